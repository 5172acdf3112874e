"""Parameters of a function, imported or parsed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_inflight_tools.source_tree import FunctionNode


@dataclass(frozen=True)
class Parameters:
    """Names of parameters: ``positional``, or ``named`` for keyword-only ones.

    ``takes_rest`` and ``takes_names`` are true with ``*args`` and ``**kwargs``.
    """

    positional: tuple[str, ...]
    named: frozenset[str]
    optional: frozenset[str]
    takes_rest: bool
    takes_names: bool

    @property
    def all(self) -> frozenset[str]:
        return self.named | set(self.positional)

    def without_first(self, count: int = 1) -> Parameters:
        return Parameters(
            self.positional[count:], self.named, self.optional, self.takes_rest, self.takes_names
        )

    @classmethod
    def of_node(cls, node: FunctionNode) -> Parameters:
        """Read a parsed function's parameters."""
        args = node.args
        positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
        defaults = positional[len(positional) - len(args.defaults) :]
        named = [arg.arg for arg in args.kwonlyargs]
        optional = [n for n, d in zip(named, args.kw_defaults, strict=True) if d is not None]
        return cls(
            tuple(positional),
            frozenset(named),
            frozenset([*defaults, *optional]),
            args.vararg is not None,
            args.kwarg is not None,
        )

    @classmethod
    def of_function(cls, function: Callable[..., Any]) -> Parameters:
        parameters = inspect.signature(function).parameters.values()
        by_position = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        return cls(
            tuple(each.name for each in parameters if each.kind in by_position),
            frozenset(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY),
            frozenset(p.name for p in parameters if p.default is not inspect.Parameter.empty),
            any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters),
            any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters),
        )


def why_no_replacement(theirs: Parameters, ours: Parameters) -> str | None:
    """Return why ``ours`` does not accept every call allowed by ``theirs``, or None."""
    for at, (name, said) in enumerate(zip(theirs.positional, ours.positional, strict=False)):
        if name != said:
            return f"its parameter {at + 1} is {name!r}, our hook's is {said!r}"
    extra = theirs.positional[len(ours.positional) :]
    if extra and not ours.takes_rest:
        return f"our hook does not take its {_listed(extra)}"
    unknown = theirs.named - ours.named
    if unknown and not ours.takes_names:
        return f"our hook does not take its {_listed(sorted(unknown))}"
    if needed := ours.all - ours.optional - theirs.all:
        return f"it has no {_listed(sorted(needed))}, needed by our hook"
    return None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)

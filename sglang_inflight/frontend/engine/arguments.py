"""Turn the fields of a body into arguments of a Python method.

Python and HTTP callers share names, defaults and type checks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from sglang_inflight.frontend.as_sglang import convert, our_fields
from sglang_inflight.vocabulary.bodies import Body

B = TypeVar("B", bound=Body)

Given = dict[str, Any]


class Arguments(Generic[B]):
    """Arguments of one method: its signature, and their conversion to a ``shape``."""

    def __init__(
        self,
        name: str,
        shape: type[B],
        positional: tuple[str, ...] = (),
        prepare: Callable[[Any, Given], Given] | None = None,
    ) -> None:
        """``positional`` names the positional arguments; all other fields are keyword-only.

        ``prepare`` converts Python's types to fields. A positional argument without a field is
        required, and is input of ``prepare``.
        """
        self._name = name
        self._shape = shape
        self._prepare = prepare
        self.ours = frozenset(our_fields(shape)).difference(positional)
        self.signature = inspect.Signature(
            [
                inspect.Parameter("engine", inspect.Parameter.POSITIONAL_OR_KEYWORD),
                *_describe(shape, positional),
            ]
        )

    def read(self, engine: Any, args: tuple[Any, ...], named: Given) -> B:
        """Return the arguments as a ``shape``.

        Raises ``TypeError`` as Python does, ``Refused`` for an invalid value.
        """
        bound = self.signature.bind(engine, *args, **named).arguments
        del bound["engine"]
        # callers pass None for a default
        given = {
            name: value
            for name, value in bound.items()
            if value is not None or self._is_required(name)
        }
        if self._prepare is not None:
            given = self._prepare(engine, given)
        return convert(given, self._shape, f"argument of {self._name}")

    def find_ours(self, named: Given) -> list[str]:
        """Return our arguments with a non-default value."""
        defaults = {name: each.default for name, each in self.signature.parameters.items()}
        return [
            name
            for name, value in named.items()
            if name in self.ours and value is not None and value != defaults[name]
        ]

    def _is_required(self, name: str) -> bool:
        return self.signature.parameters[name].default is inspect.Parameter.empty


def _describe(shape: type[Body], positional: tuple[str, ...]) -> list[inspect.Parameter]:
    fields = {field.name: field for field in msgspec.structs.fields(shape)}
    annotations = {
        name: annotation
        for ancestor in reversed(shape.__mro__)
        for name, annotation in getattr(ancestor, "__annotations__", {}).items()
    }
    by_place, by_name = [], []
    for name in positional:
        field = fields.pop(name, None)
        by_place.append(
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=_default(field) if field is not None else inspect.Parameter.empty,
                annotation=annotations.get(name, inspect.Parameter.empty),
            )
        )
    for name, field in fields.items():
        # ``prepare`` makes the required fields without a position
        if (default := _default(field)) is not inspect.Parameter.empty:
            by_name.append(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=annotations[name],
                )
            )
    return [*by_place, *by_name]


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.required:
        return inspect.Parameter.empty
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.UNSET else field.default

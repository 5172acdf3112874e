"""Names that will go, and the one way for them to go. Imports no SGLang.

A promised name (``docs/promises.md``) gets an entry here, beside its replacement, and keeps working
until ``removed_in``:

- a field of a call's body, or a setting: the server takes the old name for the new one, and logs
  that once;
- a name of ``sglang_inflight.client``: the client has it, with a ``DeprecationWarning``.

``tests/unit/test_promises.py`` fails when the version of an entry's removal is reached, and when
the changelog does not name an entry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

V = TypeVar("V")
Kind = Literal["field", "setting", "client"]


@dataclass(frozen=True, kw_only=True)
class Deprecated:
    """One name. ``since`` and ``removed_in`` are versions; a setting's name is whole."""

    kind: Kind
    name: str
    replacement: str
    since: str
    removed_in: str

    @property
    def sentence(self) -> str:
        return (
            f"{self.name} is deprecated since {self.since}, and {self.removed_in} will not have "
            f"it: use {self.replacement}"
        )


# nothing is deprecated now
DEPRECATED: tuple[Deprecated, ...] = ()


def present_names(
    values: Mapping[str, V], kind: Kind, tell: Callable[[str], None]
) -> Mapping[str, V]:
    """Return ``values`` under their present names, and tell of each old one, once a process.

    Raises ``ValueError`` if a name and its replacement are both given.
    """
    for each in of_kind(kind):
        if each.name in values:
            if each.replacement in values:
                raise ValueError(f"{each.name} and its replacement {each.replacement} are given")
            _tell_once(tell, each.sentence)
            values = {
                each.replacement if name == each.name else name: value
                for name, value in values.items()
            }
    return values


def of_kind(kind: Kind) -> Iterable[Deprecated]:
    return (each for each in DEPRECATED if each.kind == kind)


@functools.cache
def _tell_once(tell: Callable[[str], None], sentence: str) -> None:
    tell(sentence)

"""Which class of SGLang's a Protocol is of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

P = TypeVar("P", bound=type)


@dataclass(frozen=True)
class Description:
    """``since`` is the first version that has it all, or None where all that we support have."""

    classes: tuple[str, ...]
    since: str | None


DESCRIBED: dict[type, Description] = {}


def describes(*classes: str, since: str | None = None) -> Callable[[P], P]:
    """Each member of the Protocol is one of the class, or of one of the ``classes``."""

    def note(protocol: P) -> P:
        DESCRIBED[protocol] = Description(classes, since)
        return protocol

    return note

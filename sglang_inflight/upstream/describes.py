"""Which class of SGLang's a Protocol is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

P = TypeVar("P", bound=type)

DESCRIBED: dict[type, tuple[str, ...]] = {}


def describes(*classes: str) -> Callable[[P], P]:
    """Each member of the Protocol is one of the class, or of one of the ``classes``."""

    def note(protocol: P) -> P:
        DESCRIBED[protocol] = classes
        return protocol

    return note

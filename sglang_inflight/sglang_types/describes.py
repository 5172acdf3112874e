"""Link Protocols to SGLang's classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

P = TypeVar("P", bound=type)


@dataclass(frozen=True)
class Description:
    """A Protocol's classes. ``since`` is the first SGLang with all members; None: all supported."""

    classes: tuple[str, ...]
    since: str | None


DESCRIBED: dict[type, Description] = {}


def describes(*classes: str, since: str | None = None) -> Callable[[P], P]:
    """Declare that each member of the Protocol is a member of one of the ``classes``."""

    def note(protocol: P) -> P:
        DESCRIBED[protocol] = Description(classes, since)
        return protocol

    return note

"""One assumption about SGLang, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["patch", "hook", "use", "test"]


@dataclass(frozen=True)
class Finding:
    """An assumption. ``reason`` says why it does not fit, and is None if it fits.

    ``upstream`` has SGLang's names, dotted if known, for hints on where they moved.
    """

    kind: Kind
    name: str
    reason: str | None
    upstream: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.reason is None

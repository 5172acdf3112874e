"""One thing that we say of SGLang, and whether it is so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["patch", "hook", "protocol", "import", "test"]


@dataclass(frozen=True)
class Finding:
    """``reason`` says why it does not fit, or is None where it does.

    ``upstream`` are dotted names of SGLang's, for who looks where they have gone.
    """

    kind: Kind
    name: str
    reason: str | None
    upstream: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.reason is None

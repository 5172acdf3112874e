"""Check our assumptions about SGLang against a version's source (``make port VERSION=…``).

This package reads source. It imports neither the examined SGLang nor torch, and needs neither. Our
assumptions are in three places:

1. ``patches/``: lines changed by us;
2. the declared hooks: their targets, and the parameters our hooks take;
3. our code: mypy reads every use of SGLang beside its source.

``sglang-inflight doctor`` checks the first two against the installed SGLang.
"""

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

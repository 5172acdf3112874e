"""Progress of an update's staging."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_inflight.vocabulary.answers import Status


@dataclass(frozen=True)
class Progress:
    """Staged tensors of a server's slowest rank."""

    url: str
    # "empty", "open" or "sealed"
    state: str
    tensors: int
    bytes: int

    @classmethod
    def read(cls, url: str, status: Status) -> Progress:
        """Read the progress from an answer of ``/inflight/status``."""
        slowest = min((rank.staging for rank in status.ranks), key=lambda staging: staging.bytes)
        return cls(url, slowest.state, slowest.tensors, slowest.bytes)


OnProgress = Callable[[Progress], None]

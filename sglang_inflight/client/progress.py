"""How far an update has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_inflight.status import Status


@dataclass(frozen=True)
class Progress:
    """What is staged on a server: on the rank that has the least."""

    url: str
    # "empty", "open" or "sealed"
    state: str
    tensors: int
    bytes: int

    @classmethod
    def read(cls, url: str, status: Status) -> Progress:
        """From the answer of ``/inflight/status``."""
        slowest = min((rank.staging for rank in status.ranks), key=lambda staging: staging.bytes)
        return cls(url, slowest.state, slowest.tensors, slowest.bytes)


OnProgress = Callable[[Progress], None]

"""How far an update has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Progress:
    """What is staged on a server: on the rank that has the least."""

    url: str
    # "empty", "open" or "sealed"
    state: str
    tensors: int
    bytes: int

    @classmethod
    def read(cls, url: str, status: dict[str, Any]) -> Progress:
        """From the answer of ``/inflight/status``."""
        staging = [rank["staging"] for rank in status["ranks"]]
        slowest = min(staging, key=lambda of_rank: of_rank["bytes"])
        return cls(url, slowest["state"], slowest["tensors"], slowest["bytes"])


OnProgress = Callable[[Progress], None]

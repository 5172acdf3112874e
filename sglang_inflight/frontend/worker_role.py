"""Protocols between a front end and its server's other front ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import LoRAUpdateOutput

    from sglang_inflight.sglang_types import LoadAdapterRequest


class WorkerRole(Protocol):
    """A worker's way to the owner of the server's state. Used on the worker's event loop."""

    def end(self) -> None:
        """Report the worker idle, after SIGTERM and its last request."""

    async def until_answered(self) -> None:
        """Wait for the answers to forwarded calls."""

    async def reload(self, request: LoadAdapterRequest) -> LoRAUpdateOutput:
        """Reload an evicted adapter for a request."""


class WorkersOfOwner(Protocol):
    """The owner's way to its workers, whose requests use the adapters."""

    def post_move(self, rids: list[str], from_id: str, to_id: str) -> None:
        """Tell the workers that requests have moved to another adapter."""

    async def wait_acked(self) -> None:
        """Wait until every worker has applied the owner's state."""

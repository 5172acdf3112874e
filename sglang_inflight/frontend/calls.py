"""Calls of clients, the same for HTTP, gRPC and Python."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sglang_inflight.frontend.memory import Memory
from sglang_inflight.frontend.pauses import Pauses
from sglang_inflight.frontend.updates.updates import Updates
from sglang_inflight.vocabulary.answers import (
    Begun,
    Deferred,
    Grant,
    MemoryMoved,
    NamelessGrant,
    Receipt,
    Release,
    StagedSoFar,
    WindowGrant,
    WindowRelease,
)
from sglang_inflight.vocabulary.bodies import (
    AbortUpdateBody,
    BeginBody,
    ContinueBody,
    EndBody,
    NameBody,
    PauseBody,
    ReleaseMemoryBody,
    ResumeMemoryBody,
    SealBody,
    UpdateBody,
)

if TYPE_CHECKING:
    from sglang_inflight.frontend.sglang_types.tokenizer_manager import TokenizerManager

T = TypeVar("T")


@dataclass
class Arrival:
    """Arrival of a call's body. Failures after the arrival are handled by the call itself."""

    is_whole: bool = False


class Calls:
    """Carry calls out at once. ``TransparentCalls`` defers them to ``continue_generation``."""

    def __init__(
        self,
        tokenizer_manager: TokenizerManager,
        pauses: Pauses,
        updates: Updates,
        memory: Memory,
    ) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._pauses = pauses
        self._updates = updates
        self._memory = memory

    async def pause(self, body: PauseBody) -> Grant | NamelessGrant | WindowGrant:
        sglangs = self._pauses.sglangs
        if sglangs.is_the_servers and sglangs.is_meant_by(body):
            return await sglangs.take()
        return await self._pauses.pause(body)

    async def resume(self, body: ContinueBody) -> Release | WindowRelease:
        return await self._pauses.resume(body)

    async def is_paused(self) -> bool:
        return await self._pauses.is_paused()

    async def update(self, body: UpdateBody) -> Receipt | StagedSoFar:
        return await self._updates.update(body)

    @contextmanager
    def piece(self) -> Iterator[Arrival]:
        """Wrap a call with weights, from the first byte of its body on.

        An incomplete body drops the session if the session takes pieces without an id. Its client
        may end the session without reading the answers to its pieces.
        """
        arrival, session = Arrival(), self._updates.unnamed_session
        try:
            yield arrival
        except BaseException:
            if session is not None and not arrival.is_whole:
                self._updates.lose(session, "a piece of the session was unreadable or incomplete")
            raise

    async def begin(self, body: BeginBody) -> Begun | Deferred:
        return await self._updates.begin(body)

    async def seal(self, body: SealBody) -> StagedSoFar:
        return await self._updates.seal(body)

    async def end(self, body: EndBody) -> Receipt | Deferred:
        return await self._updates.end(body)

    async def abort(self, body: AbortUpdateBody) -> None:
        await self._updates.abort(body)

    async def rename(self, body: NameBody) -> dict[str, Any]:
        return await self._updates.rename(body)

    async def flush(self, flush: Callable[[], Awaitable[T]]) -> T:
        """Wrap SGLang's own flush of the prefix cache."""
        return await flush()

    async def release_memory(self, body: ReleaseMemoryBody) -> MemoryMoved:
        return await self._memory.release(body)

    async def resume_memory(self, body: ResumeMemoryBody) -> MemoryMoved:
        return await self._memory.resume(body)

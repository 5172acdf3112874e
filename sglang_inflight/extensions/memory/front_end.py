"""Release and resume memory on all ranks while requests wait.

``on_rank.py`` has a rank's part. Every rank votes before any rank acts: if one
rank refuses or is silent, all ranks keep their memory and run on.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, TypeVar

import torch
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.managers.io_struct import (
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)

from sglang_inflight.extensions.memory.messages import (
    CancelReleaseCall,
    Moved,
    PrepareReleaseCall,
    PrepareResumeCall,
    ReleaseCall,
    ResumeCall,
)
from sglang_inflight.frontend.aio import carry_through
from sglang_inflight.frontend.frontend import ENDS, FRONT_PARTS, HANDLERS, Frontend
from sglang_inflight.frontend.handlers import Handlers
from sglang_inflight.frontend.pauses import Pauses
from sglang_inflight.frontend.ranks import Ranks, describe_failures, require_success
from sglang_inflight.frontend.updates.two_phase import TwoPhase
from sglang_inflight.messages import Failed
from sglang_inflight.vocabulary.answers import GONE, Capabilities, MemoryMoved, RankMemory
from sglang_inflight.vocabulary.bodies import ReleaseMemoryBody, ResumeMemoryBody
from sglang_inflight.vocabulary.errors import HalfDone, RankSilent, Refused

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

# A copy of the weights may have to be written, or read.
MOVE_TIMEOUT_S = 600.0
STAY_TIMEOUT_S = 10.0

KINDS: tuple[str, ...] = tuple(GPU_MEMORY_ALL_TYPES)

M = TypeVar("M", ReleaseCall, ResumeCall)


class Memory:
    """Releases of one server, one at a time, and none during an update.

    Lives on the front end's event loop. A release or resume that was sent finishes even if its
    caller leaves. Servers without pauses use SGLang's own calls, which need an idle server.
    """

    def __init__(
        self,
        tokenizer_manager: TokenizerManager,
        ranks: Ranks,
        pauses: Pauses,
        two_phase: TwoPhase,
        can: Capabilities,
    ) -> None:
        self._can = can
        self._tokenizer_manager = tokenizer_manager
        self._tasks = tokenizer_manager.asyncio_tasks
        self._ranks = ranks
        self._pauses = pauses
        self._two_phase = two_phase
        self._moving = asyncio.Lock()

    async def release(self, body: ReleaseMemoryBody) -> MemoryMoved:
        """Release the memory of ``tags``; ranks take no step until all memory is resumed.

        ``keep_weights`` decides about a copy of the weights on the host; without a copy they
        come back hollow. Raises ``Conflict`` if requests need the memory, an update is running, or
        the memory is released already; every rank then stays unchanged.
        """
        tags = read_tags(body.tags)
        if self._can.keep_weights is not None:
            if body.keep_weights is not None:
                raise Refused(self._can.keep_weights)
            if not torch.cuda.is_available():
                raise Refused(f"SGLang releases memory only on CUDA, and {self._can.keep_weights}")
            await self._tokenizer_manager.release_memory_occupation(
                ReleaseMemoryOccupationReqInput(tags=tags)
            )
            return MemoryMoved(message="Memory is released by SGLang's own call.", paused=False)
        async with AsyncExitStack() as alone:
            await alone.enter_async_context(self._moving)
            await alone.enter_async_context(self._two_phase.alone())
            try:
                vote = PrepareReleaseCall(tags=tags, keep_weights=body.keep_weights)
                await self._ranks.call(vote, MOVE_TIMEOUT_S)
            except BaseException:
                await asyncio.shield(self._cancel_release())
                raise
            message = f"Memory is released: {', '.join(tags)}."
            return await self._carry_through(ReleaseCall(), message, alone)

    async def resume(self, body: ResumeMemoryBody, *, until_filled: bool = False) -> MemoryMoved:
        """Resume the memory of ``tags``. With all memory back, generation continues unless paused.

        While weights are hollow, requests end with 503 unless a pause holds them; with
        ``until_filled`` they wait. Raises ``Conflict`` if the memory was not released.
        """
        tags = read_tags(body.tags)
        if self._can.keep_weights is not None:
            await self._tokenizer_manager.resume_memory_occupation(
                ResumeMemoryOccupationReqInput(tags=tags)
            )
            return MemoryMoved(message="Memory is resumed by SGLang's own call.", paused=False)
        async with AsyncExitStack() as alone:
            await alone.enter_async_context(self._moving)
            await self._ranks.call(PrepareResumeCall(tags=tags), MOVE_TIMEOUT_S)
            call = ResumeCall(tags=tags, until_filled=until_filled)
            return await self._carry_through(call, f"Memory is back: {', '.join(tags)}.", alone)

    async def released(self) -> list[str]:
        """Return the kinds of memory released on any rank."""
        said = [rank.memory for rank in await self._pauses.ask_status()]
        return [kind for kind in KINDS if any(each[kind] in GONE for each in said)]

    async def _carry_through(self, call: M, message: str, alone: AsyncExitStack) -> MemoryMoved:
        """Finish the move even if its caller leaves; keep ``alone``'s locks until then.

        ``alone`` passes to the task without an await, so a cancelled caller releases no lock.
        """
        return await carry_through(self._tasks, self._move_alone(call, message, alone.pop_all()))

    async def _move_alone(self, call: M, message: str, alone: AsyncExitStack) -> MemoryMoved:
        async with alone:
            return await self._move(call, message)

    async def _move(self, call: M, message: str) -> MemoryMoved:
        answers: list[Moved | Failed] = await self._ranks.ask_to_carry_out(call, MOVE_TIMEOUT_S)
        failed = [answer for answer in answers if isinstance(answer, Failed)]
        if failed and len(failed) < len(answers):
            raise HalfDone(f"Memory was moved on some ranks: {describe_failures(failed)}")
        moved = require_success(answers)
        hollow = next((answer.hollow for answer in moved if answer.hollow is not None), None)
        return MemoryMoved(
            message=message if hollow is None else f"{message} The weights are hollow: {hollow}.",
            paused=any(answer.paused for answer in moved),
            hollow=hollow,
            ranks=tuple(
                RankMemory(
                    dp_rank=answer.dp_rank,
                    tp_rank=answer.tp_rank,
                    pp_rank=answer.pp_rank,
                    bytes=answer.bytes,
                    seconds=answer.seconds,
                )
                for answer in moved
            ),
        )

    async def _cancel_release(self) -> None:
        try:
            await self._ranks.ask(CancelReleaseCall(), STAY_TIMEOUT_S)
            await self._pauses.ask_status()
        except RankSilent:
            # a silent rank handles the message at its next step boundary
            pass


@FRONT_PARTS.join()
def make_memory(frontend: Frontend, tokenizer_manager: TokenizerManager) -> Memory:
    return Memory(
        tokenizer_manager, frontend.ranks, frontend.pauses, frontend.two_phase, frontend.can
    )


@HANDLERS.join()
def add_handlers(frontend: Frontend, _: TokenizerManager, handlers: Handlers) -> Handlers:
    memory = frontend.part(Memory)
    return handlers.with_more(
        {
            "release_memory_occupation": memory.release,
            "resume_memory_occupation": memory.resume,
        }
    )


@ENDS.join()
async def resume_all(frontend: Frontend) -> None:
    """Resume all memory, so that requests can end: with 503 on hollow weights."""
    memory = frontend.part(Memory)
    if released := await memory.released():
        await memory.resume(ResumeMemoryBody(tags=released))


def read_tags(tags: list[str] | None) -> list[str]:
    """Return the kinds of memory; all for no tags, as in SGLang. Raises ``Refused`` for others."""
    named = list(tags or KINDS)
    if unknown := set(named) - set(KINDS):
        raise Refused(
            f"unknown memory tags: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}"
        )
    if len(set(named)) < len(named):
        raise Refused(f"a memory tag is named twice: {', '.join(named)}")
    return named

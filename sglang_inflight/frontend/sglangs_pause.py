"""SGLang's own pause, of a server whose loop has no pause states.

It ends all requests, and keeps those that come back in the front end, so that it needs nothing
of a loop. It has one mode, and no name and no lease. SGLang's other modes need a loop that knows
of them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

from sglang_inflight.errors import Conflict
from sglang_inflight.frontend.bodies import ContinueBody, PauseBody
from sglang_inflight.grants import NamelessGrant, Release
from sglang_inflight.unsupported import why_no_pause

if TYPE_CHECKING:
    from sglang_inflight.frontend.sglang_types.tokenizer_manager import TokenizerManager


@dataclass(frozen=True)
class CallOriginal:
    """What our hook of SGLang's method hands through to it."""

    request: Any


class SGLangsPause:
    """Taken and let go of. ``TokenizerManager.is_pause`` is the state itself here."""

    def __init__(self, tokenizer_manager: TokenizerManager) -> None:
        self._tokenizer_manager = tokenizer_manager

    @property
    def is_the_servers(self) -> bool:
        """Whether this is the server's pause, and ours are not."""
        return why_no_pause() is not None

    @property
    def holds(self) -> bool:
        return self.is_the_servers and self._tokenizer_manager.is_pause

    def is_meant_by(self, body: PauseBody) -> bool:
        """Whether SGLang has such a call."""
        return (body.mode or "abort") == "abort" and body == PauseBody(mode=body.mode)

    async def take(self) -> NamelessGrant:
        """Returns when no request is left. A caller that leaves before holds nothing.

        Raises ``Conflict`` where the server was told to go.
        """
        if self._tokenizer_manager.gracefully_exit:
            raise Conflict("the server is told to go: it ends its requests, and pauses no more")
        was_held = self.holds
        call = PauseGenerationReqInput(mode="abort")
        try:
            await self._tokenizer_manager.pause_generation(CallOriginal(call))
        except BaseException:
            if not was_held:
                await asyncio.shield(self._let_go(torch_empty_cache=False))
            raise
        return NamelessGrant(weight_version=self._tokenizer_manager.config_value("weight_version"))

    async def let_go(self, body: ContinueBody) -> Release:
        """Raises ``Conflict`` where a name is given, because none has one."""
        if body.pause_id is not None:
            raise Conflict(f"pause {body.pause_id!r} is not held: {why_no_pause()}")
        await self._let_go(torch_empty_cache=body.torch_empty_cache)
        return Release(message="Generation continued successfully.", paused=False)

    async def _let_go(self, *, torch_empty_cache: bool) -> None:
        call = ContinueGenerationReqInput(torch_empty_cache=torch_empty_cache)
        await self._tokenizer_manager.continue_generation(CallOriginal(call))


async def let_requests_in(tokenizer_manager: TokenizerManager) -> None:
    """In a worker, where another process has let go of the pause."""
    async with tokenizer_manager.is_pause_cond:
        tokenizer_manager.is_pause_cond.notify_all()

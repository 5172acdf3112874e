"""SGLang's own pause, for servers whose loop has no pause states.

This pause aborts all requests and holds new ones back in the front end, so the scheduler's loop
takes no part. The only mode is ``abort``; there is no id and no lease. SGLang's other modes need
support in the loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

from sglang_inflight.vocabulary.answers import Capabilities, NamelessGrant, Release
from sglang_inflight.vocabulary.bodies import ContinueBody, PauseBody
from sglang_inflight.vocabulary.errors import Conflict

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager


@dataclass(frozen=True)
class CallOriginal:
    """A request for our hook to pass to SGLang's own method."""

    request: Any


class SGLangsPause:
    """Take and release SGLang's pause. ``TokenizerManager.is_pause`` is its state."""

    def __init__(self, tokenizer_manager: TokenizerManager, can: Capabilities) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._can = can

    @property
    def is_the_servers(self) -> bool:
        """Whether this server has only SGLang's pause, and none of ours."""
        return self._can.pause is not None

    @property
    def holds(self) -> bool:
        return self.is_the_servers and self._tokenizer_manager.is_pause

    def is_meant_by(self, body: PauseBody) -> bool:
        """Whether the body has no fields of ours and no mode but ``abort``."""
        return (body.mode or "abort") == "abort" and body == PauseBody(mode=body.mode)

    async def take(self) -> NamelessGrant:
        """Pause; return when no request is left. If the caller leaves before, release the pause.

        Raises ``Conflict`` after SIGTERM.
        """
        if self._tokenizer_manager.gracefully_exit:
            raise Conflict("the server is shutting down (SIGTERM), and takes no new pause")
        was_held = self.holds
        call: Any = CallOriginal(PauseGenerationReqInput(mode="abort"))
        try:
            await self._tokenizer_manager.pause_generation(call)
        except BaseException:
            if not was_held:
                await asyncio.shield(self._release(torch_empty_cache=False))
            raise
        return NamelessGrant(weight_version=self._tokenizer_manager.config_value("weight_version"))

    async def release(self, body: ContinueBody) -> Release:
        """Release the pause. Raises ``Conflict`` for a ``pause_id``: SGLang's pause has no id."""
        if body.pause_id is not None:
            raise Conflict(f"pause {body.pause_id!r} is not held: {self._can.pause}")
        await self._release(torch_empty_cache=body.torch_empty_cache)
        return Release(message="Generation continued successfully.", paused=False)

    async def _release(self, *, torch_empty_cache: bool) -> None:
        call: Any = CallOriginal(ContinueGenerationReqInput(torch_empty_cache=torch_empty_cache))
        await self._tokenizer_manager.continue_generation(call)


async def admit_requests(tokenizer_manager: TokenizerManager) -> None:
    """Let a worker's held-back requests in, after another process released the pause."""
    async with tokenizer_manager.is_pause_cond:
        tokenizer_manager.is_pause_cond.notify_all()

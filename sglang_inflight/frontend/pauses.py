"""One pause across all ranks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from typing import TYPE_CHECKING, Any

from sglang_inflight.errors import Conflict, RankSilent, Refused
from sglang_inflight.frontend.metrics import Metrics
from sglang_inflight.frontend.ranks import Ranks, require_success
from sglang_inflight.messages import (
    ContinueCall,
    PauseCall,
    PauseMode,
    RankAnswer,
    StatusCall,
)
from sglang_inflight.unsupported import why_no_pause

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

# A step may take long (a prefill of many thousand tokens), and a pause waits for it.
GRANT_TIMEOUT_S = 120.0
FORSAKE_TIMEOUT_S = 1.0
LOOK_AGAIN_S = 1.0

logger = logging.getLogger(__name__)


class Pauses:
    """Takes, renews and lets go of pauses. The state itself is the schedulers'.

    ``TokenizerManager.is_pause`` follows along for upstream's readers of it (``/ready``,
    gRPC). It gates nothing: patch 0003 lets requests through to the schedulers' queues.
    """

    def __init__(self, tokenizer_manager: TokenizerManager, ranks: Ranks, metrics: Metrics) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._metrics = metrics
        self._ranks = ranks
        self._looking = asyncio.Lock()
        self._looked_at = -math.inf
        self._seen_mode: str | None = None

    async def pause(
        self,
        mode: PauseMode | None = None,
        *,
        pause_id: str | None = None,
        lease_s: float | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Pause generation; returns when every rank stands still.

        ``pause_id`` renews the pause of that name, and ``mode`` may change it; a new pause
        is an ``abort`` where no mode is given, as upstream has it. After ``lease_s`` seconds
        without a renewal generation continues by itself. ``timeout_s`` bounds the mode
        ``wait``; requests that still run then stay frozen, as by ``in_place``.

        Raises ``Conflict`` where ``pause_id`` is not held any more, ``Refused`` where the
        server's loop has no pause states.
        """
        if (reason := why_no_pause()) is not None:
            raise Refused(reason)
        call = PauseCall(
            call_id="",
            mode=mode if pause_id is not None else mode or "abort",
            pause_id=pause_id or uuid.uuid4().hex,
            renews=pause_id is not None,
            lease_s=lease_s,
            timeout_s=timeout_s,
        )
        patience = GRANT_TIMEOUT_S if mode != "wait" else (timeout_s or 86400.0) + GRANT_TIMEOUT_S
        self._tokenizer_manager.is_pause = True
        began = time.perf_counter()
        try:
            answers = await self._ranks.call(call, patience)
            require_success(answers)
        except Refused:
            if not call.renews:
                await self._forsake(call.pause_id)
            await self.look()
            raise
        granted_mode = answers[0].detail["mode"]
        self._metrics.pause_grant.labels(granted_mode).observe(time.perf_counter() - began)
        return {
            "status": "ok",
            "message": "Generation paused successfully.",
            "paused": True,
            "mode": granted_mode,
            "pause_id": call.pause_id,
            "weight_version": self._tokenizer_manager.config_value("weight_version"),
            "ranks": [_count(answer) for answer in answers],
        }

    async def resume(
        self, *, pause_id: str | None = None, torch_empty_cache: bool = True
    ) -> dict[str, Any]:
        """Let go of one pause, or of all; generation goes on when none is left.

        Raises ``Conflict`` where ``pause_id`` is not held any more.
        """
        call = ContinueCall(call_id="", pause_id=pause_id, torch_empty_cache=torch_empty_cache)
        answers = await self._ranks.call(call, GRANT_TIMEOUT_S)
        require_success(answers)
        paused = any(answer.detail["paused"] for answer in answers)
        self._tokenizer_manager.is_pause = paused
        return {
            "status": "ok",
            "message": "Generation continued successfully."
            if not paused
            else "Generation stays paused: there are other holders.",
            "paused": paused,
        }

    async def _forsake(self, pause_id: str) -> None:
        """Let go wherever it is held: a caller that was refused holds a pause on no rank."""
        call = ContinueCall(call_id="", pause_id=pause_id, torch_empty_cache=False)
        # a silent rank takes the message in when it comes to its next boundary
        with contextlib.suppress(RankSilent):
            await self._ranks.call(call, FORSAKE_TIMEOUT_S)

    async def is_paused(self) -> bool:
        paused = {answer.detail["paused"] for answer in await self.look()}
        if len(paused) > 1:
            raise Conflict("the replicas differ: some are paused, some are not")
        return paused.pop()

    async def mode(self) -> str | None:
        """The mode of the pause that holds now, and None where none does.

        Asked for by every stream that is silent, so the ranks are asked once a second.
        """
        if not self._tokenizer_manager.is_pause:
            return None
        async with self._looking:
            if time.monotonic() >= self._looked_at + LOOK_AGAIN_S:
                try:
                    details = [answer.detail for answer in await self.look()]
                except Refused as error:
                    logger.warning("Whether generation is paused is not known: %s", error)
                    return None
                paused = [detail["mode"] for detail in details if detail["paused"]]
                self._seen_mode = paused[0] if paused else None
                self._looked_at = time.monotonic()
        return self._seen_mode

    async def look(self) -> list[RankAnswer]:
        """Each rank's own account of itself."""
        answers = await self._ranks.call(StatusCall(call_id=""), GRANT_TIMEOUT_S)
        require_success(answers)
        self._tokenizer_manager.is_pause = any(a.detail["paused"] for a in answers)
        return answers


def _count(answer: RankAnswer) -> dict[str, Any]:
    counts = ("running", "waiting", "retracted", "aborted")
    return {**answer.rank, **{name: answer.detail[name] for name in counts}}

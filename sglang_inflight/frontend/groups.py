"""Groups with trainers, across all ranks."""

from __future__ import annotations

import logging

from sglang_inflight.errors import RankSilent
from sglang_inflight.frontend.bodies import JoinGroupBody, LeaveGroupBody
from sglang_inflight.frontend.ranks import Ranks, require_success
from sglang_inflight.messages import (
    GiveUpTransferCall,
    JoinGroupCall,
    LeaveGroupCall,
)
from sglang_inflight.settings import Settings

logger = logging.getLogger(__name__)

# Beyond the rendezvous: a staging thread may have a job to finish first.
PATIENCE_S = 120.0
GIVE_UP_TIMEOUT_S = 10.0


class Groups:
    """Joins and leaves groups, and keeps them in step. Lives on the front end's event loop."""

    def __init__(self, ranks: Ranks, settings: Settings) -> None:
        self._ranks = ranks
        self._settings = settings

    async def join(self, body: JoinGroupBody) -> None:
        call = JoinGroupCall(
            call_id="",
            master_address=body.master_address,
            master_port=body.master_port,
            rank_offset=body.rank_offset,
            world_size=body.world_size,
            group_name=body.group_name,
            backend=body.backend,
        )
        require_success(await self._ranks.call(call, self._settings.group_timeout_s + PATIENCE_S))

    async def leave(self, body: LeaveGroupBody) -> None:
        call = LeaveGroupCall(call_id="", group_name=body.group_name)
        require_success(await self._ranks.call(call, PATIENCE_S))

    async def give_up(self, group_name: str, transfer_id: str | None, error: BaseException) -> str:
        """A call failed: no later one may take in what was sent for it.

        ``transfer_id`` is None where the call's body could not be read. Returns what its
        caller must know besides, which is nothing where every rank took all of it in. The
        message goes out before any later update's on the same socket, so it holds whether
        it is answered or not.
        """
        call = GiveUpTransferCall(
            call_id="", group_name=group_name, transfer_id=transfer_id, reason=f"{error}"
        )
        try:
            answers = await self._ranks.call(call, GIVE_UP_TIMEOUT_S)
        except RankSilent as silence:
            logger.error("Group %r, after a failed update: %s", group_name, silence)
            return ""
        if not any(answer.success and answer.detail["broken"] for answer in answers):
            return ""
        return (
            f" Group {group_name!r} is out of step with its trainer now: destroy it and join anew."
        )

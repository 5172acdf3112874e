"""Join and leave trainers' process groups on all ranks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.messages import (
    DistributedSource,
    Failed,
    GiveUpTransferCall,
    JoinGroupCall,
    LeaveGroupCall,
    MeetBy,
    PartsSource,
    Source,
)
from sglang_inflight.settings import Settings
from sglang_inflight.vocabulary.bodies import JoinGroupBody, LeaveGroupBody
from sglang_inflight.vocabulary.errors import InflightError, RankSilent, Refused, UnknownLayout

logger = logging.getLogger(__name__)

# ranks keep the rendezvous' time limit themselves; the front end waits this much longer
GRACE_S = 15.0
# long, because a staging thread may have a job to finish first
LEAVE_TIMEOUT_S = 120.0
GIVE_UP_TIMEOUT_S = 10.0


class Groups:
    """Joins and leaves groups, and marks broken ones. Lives on the front end's event loop."""

    def __init__(self, ranks: Ranks, settings: Settings) -> None:
        self._ranks = ranks
        self._settings = settings
        # a group's name -> digest of the layout that its next call must have
        self._owed: dict[str, str] = {}

    async def join(self, body: JoinGroupBody, rendezvous: MeetBy = "torch") -> None:
        """Join a trainer's group on every rank. If the caller disconnects, cancel the join.

        Raises ``Refused`` if the group was not formed, ``OutcomeUnknown`` if a rank did not
        answer.
        """
        call = JoinGroupCall(
            master_address=body.master_address,
            master_port=body.master_port,
            rank_offset=body.rank_offset,
            world_size=body.world_size,
            group_name=body.group_name,
            backend=body.backend,
            rendezvous=rendezvous,
        )
        patience = self._settings.group_timeout_s + GRACE_S
        try:
            await self._ranks.carry_out(call, patience)
        except asyncio.CancelledError:
            await asyncio.shield(self._stop_joining(call))
            raise
        self._owed.pop(body.group_name, None)

    async def leave(self, body: LeaveGroupBody) -> None:
        call = LeaveGroupCall(group_name=body.group_name)
        await self._ranks.carry_out(call, LEAVE_TIMEOUT_S)

    @asynccontextmanager
    async def mark_broken_on_failure(self, source: Source) -> AsyncIterator[None]:
        """Mark the source's group broken if the block fails (see ``in_step_by_name``).

        ``UnknownLayout`` breaks no group. No rank has posted a broadcast, and the trainer's own may
        wait for the repeated call. So the group's next call must be that one: another call would
        receive the waiting broadcast under its own names.
        """
        if isinstance(source, PartsSource):
            async with self.in_step_by_name(source.group_name, source.transfer_id):
                yield
            return
        if not isinstance(source, DistributedSource):
            yield
            return
        name, digest = source.group_name, source.layout_digest
        async with self.in_step_by_name(name, source.transfer_id):
            owed = self._owed.pop(name, None)
            if owed not in (None, digest):
                raise Refused(
                    f"the last call in group {name!r} was refused because its layout {owed} is not "
                    "known here, and this is not the same call with its whole layout."
                )
            try:
                yield
            except UnknownLayout:
                assert digest is not None
                self._owed[name] = digest
                raise

    @asynccontextmanager
    async def in_step_by_name(
        self, group_name: str, transfer_id: str | None = None
    ) -> AsyncIterator[None]:
        """If the block raises, keep later calls from receiving its broadcasts.

        The error then says whether the group is broken. ``transfer_id`` is None if the call's body
        could not be read.
        """
        try:
            yield
        except UnknownLayout:
            raise
        except BaseException as error:
            broken = await asyncio.shield(self._give_up(group_name, transfer_id, error))
            if broken and isinstance(error, InflightError):
                raise type(error)(
                    f"{error} Group {group_name!r} is out of step with its trainer: destroy it "
                    "and join anew."
                ) from error
            raise

    async def _stop_joining(self, join: JoinGroupCall) -> None:
        """Cancel ``join`` on every rank. Earlier or later groups of its name stay."""
        call = LeaveGroupCall(group_name=join.group_name, join_id=join.call_id)
        try:
            await self._ranks.ask(call, GIVE_UP_TIMEOUT_S)
        except RankSilent as silence:
            logger.error("Group %r, whose join was given up: %s", join.group_name, silence)

    async def _give_up(
        self, group_name: str, transfer_id: str | None, error: BaseException
    ) -> bool:
        """Give a transfer up. Return whether a rank missed broadcasts, so that the group is broken.

        The message precedes any later update's on the same socket, so the ranks obey it even if
        an answer is lost.
        """
        call = GiveUpTransferCall(group_name=group_name, transfer_id=transfer_id, reason=f"{error}")
        try:
            answers = await self._ranks.ask(call, GIVE_UP_TIMEOUT_S)
        except RankSilent as silence:
            logger.error("Group %r, after a failed update: %s", group_name, silence)
            return False
        return any(answer.broken for answer in answers if not isinstance(answer, Failed))

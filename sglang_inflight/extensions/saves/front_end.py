"""Have the ranks of one replica write the weights that they serve, for another server."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from sglang_inflight.extensions.saves.manifest import FORMAT, Manifest, SavedRank, name_of_rank
from sglang_inflight.extensions.saves.messages import (
    DiscardSavedCall,
    EndSaveCall,
    SaveCall,
    Written,
)
from sglang_inflight.frontend.aio import Deadline
from sglang_inflight.frontend.frontend import HANDLERS, Frontend
from sglang_inflight.frontend.handlers import Handlers
from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.frontend.updates.two_phase import GRACE_S
from sglang_inflight.vocabulary.answers import RankSaved, Saved
from sglang_inflight.vocabulary.bodies import DiscardBody, SaveBody
from sglang_inflight.vocabulary.errors import Conflict, RankSilent

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

_DELETE_S = 60.0
# the caller's own error tells more than a delay
_CLEAN_UP_S = 10.0


class Saves:
    """Saves of one server. Lives on the front end's event loop.

    A save takes no turn of an update. The ranks give it up when a commit comes.
    """

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        """``timeout_s`` is the limit of a call that names none."""
        self._ranks = ranks
        self._timeout_s = timeout_s

    async def save(self, body: SaveBody) -> Saved:
        """Return when the folder is whole, and its version still served.

        After a failure the files written so far are deleted. Raises ``Conflict`` if the version
        moves on meanwhile.
        """
        started = time.monotonic()
        deadline = Deadline(body.timeout_s or self._timeout_s)
        save_id = uuid.uuid4().hex
        call = SaveCall(
            path=body.path,
            save_id=save_id,
            expected_version=body.expected_version,
            timeout_s=deadline.seconds_left,
        )
        try:
            written = await self._ranks.call(call, deadline.seconds_left + GRACE_S)
            saved = _ranks_of(written)
            await self._end(body.path, save_id, written[0].weight_version, saved, deadline)
        except BaseException:
            await asyncio.shield(self._clean_up(body.path, save_id))
            raise
        return Saved(
            message=f"The served weights are saved in {body.path}.",
            path=body.path,
            weight_version=written[0].weight_version,
            seconds=time.monotonic() - started,
            bytes=sum(rank.bytes for rank in saved),
            ranks=saved,
        )

    async def _end(
        self,
        path: str,
        save_id: str,
        version: str,
        saved: tuple[RankSaved, ...],
        deadline: Deadline,
    ) -> None:
        manifest = Manifest(
            format=FORMAT,
            format_version=1,
            save_id=save_id,
            weight_version=version,
            ranks={
                name_of_rank(rank.pp_rank, rank.tp_rank): SavedRank(rank.digest, rank.bytes)
                for rank in saved
            },
        )
        call = EndSaveCall(
            path=path,
            save_id=save_id,
            manifest=msgspec.json.encode(manifest),
            timeout_s=deadline.seconds_left,
        )
        await self._ranks.call(call, deadline.seconds_left + GRACE_S)

    async def discard(self, body: DiscardBody) -> None:
        """Delete what a save has written. A folder without it is left as it is."""
        call = DiscardSavedCall(path=body.path, timeout_s=_DELETE_S)
        await self._ranks.call(call, _DELETE_S + GRACE_S)

    async def _clean_up(self, path: str, save_id: str) -> None:
        call = DiscardSavedCall(path=path, save_id=save_id, timeout_s=_CLEAN_UP_S)
        # a silent rank gives up by its own time limit, and deletes its files itself
        with suppress(RankSilent):
            await self._ranks.ask(call, _CLEAN_UP_S + GRACE_S)


@HANDLERS.join()
def add_handlers(frontend: Frontend, _: TokenizerManager, handlers: Handlers) -> Handlers:
    saves = Saves(frontend.ranks, frontend.settings.update_timeout_s)
    return handlers.with_more(
        {"save_served_weights": saves.save, "discard_saved_weights": saves.discard}
    )


def _ranks_of(written: list[Written]) -> tuple[RankSaved, ...]:
    """Return the ranks that wrote files. Raises ``Conflict`` if their versions differ."""
    versions = {rank.weight_version for rank in written if rank.digest is not None}
    if len(versions) > 1:
        raise Conflict(f"the ranks serve {' and '.join(sorted(versions))}: save again")
    return tuple(
        RankSaved(tp_rank=rank.tp_rank, pp_rank=rank.pp_rank, digest=rank.digest, bytes=rank.bytes)
        for rank in written
        if rank.digest is not None
    )

"""Has an update wait for requests of the previous version, over which it is staged."""

from __future__ import annotations

import asyncio
import functools
import logging

from sglang_inflight.extensions.pins import PinsSettings
from sglang_inflight.frontend.aio import Deadline
from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.frontend.updates.open_update import OpenUpdate
from sglang_inflight.frontend.updates.two_phase import COMMIT_TIMEOUT_S, OPENINGS
from sglang_inflight.messages import StatusCall
from sglang_inflight.settings import read
from sglang_inflight.vocabulary.answers import Capabilities

logger = logging.getLogger(__name__)

# between two looks at the requests of the previous version
_POLL_S = 0.02


@functools.cache
def _grace_s() -> float:
    return read(PinsSettings).previous_grace_s


@OPENINGS.join()
async def wait_for_previous(
    ranks: Ranks, can: Capabilities, update: OpenUpdate, deadline: Deadline
) -> None:
    """Wait until no request needs the previous version, over which the update is staged.

    The grace, the deadline or a pause end the wait; the opening then ends these requests.
    """
    if _grace_s() == 0 or can.pin is not None:
        return
    grace = Deadline(min(_grace_s(), deadline.seconds_left))
    while grace.seconds_left > 0:
        update.require_alive()
        described = await ranks.call(StatusCall(), COMMIT_TIMEOUT_S)
        is_frozen = any(rank.pause.paused for rank in described)
        if is_frozen or not any(rank.weights.pinned_to_previous for rank in described):
            return
        await asyncio.sleep(_POLL_S)
    logger.warning(
        "The update does not wait any longer for requests pinned to the previous version."
    )

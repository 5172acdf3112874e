"""Drains a server: no new requests, and at a deadline no old ones.

    begin       new requests are refused, and the server is not ready
    until then  running requests go on, and most end by themselves
    deadline    the others end with the tokens they have, as by ``abort_all``
    afterwards  requests that had passed the door earlier end in the same way

``finish_reason`` of a request that was handed back is ``abort``. Its caller can go on at another
server, from the tokens of the answer.

The drain lives on the front end's event loop, and ends with the process or by its cancellation.
With several tokenizer workers it is the owner's, whose state closes the doors of the workers.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from sglang_inflight.extensions.drain import DrainSettings
from sglang_inflight.frontend.aio import Deadline
from sglang_inflight.frontend.frontend import (
    BEHIND,
    ENDS,
    FRONT_PARTS,
    HANDLERS,
    LEAVING,
    Frontend,
)
from sglang_inflight.frontend.handlers import Handlers
from sglang_inflight.settings import read
from sglang_inflight.vocabulary.answers import Drained
from sglang_inflight.vocabulary.bodies import ContinueBody, DrainBody, PauseBody
from sglang_inflight.vocabulary.errors import InflightError

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

logger = logging.getLogger(__name__)

# between two counts of the requests
_POLL_S = 0.1


class Drain:
    """The drain of one server."""

    def __init__(self, frontend: Frontend, tokenizer_manager: TokenizerManager) -> None:
        self._frontend = frontend
        self._tokenizer_manager = tokenizer_manager
        self._task: asyncio.Task[None] | None = None
        # None while the server does not drain
        self.why: str | None = None

    async def call(self, body: DrainBody) -> Drained:
        """Begin to drain, give a running drain another deadline, or end it.

        Raises ``RankSilent`` before anything changes if a rank does not say what runs.
        """
        requests = await self._requests()
        self._end()
        if body.cancel:
            return Drained(message="The server takes new requests.", draining=False, requests=0)
        self.begin(body.deadline_s, body.reason)
        return Drained(
            message=f"Requests that still run in {body.deadline_s:g} s end with their tokens.",
            draining=True,
            requests=requests,
        )

    def begin(self, deadline_s: float, reason: str | None) -> None:
        self.why = "the server drains" + (f" ({reason})" if reason else "")
        logger.warning("%s; requests end within %g s.", self.why.capitalize(), deadline_s)
        self._frontend.on_change()
        self._task = asyncio.create_task(self._run(Deadline(deadline_s)))

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task, self.why = None, None
        self._frontend.on_change()

    async def _run(self, deadline: Deadline) -> None:
        is_told = False
        while True:
            try:
                requests = await self._requests()
                if requests and deadline.is_over:
                    # a request that passed the door earlier may come after the first abort
                    await self._end_all()
            except InflightError as error:
                logger.warning("The drain goes on: %s", error)
            else:
                if not requests and not is_told:
                    logger.info("The server is drained: no request is left.")
                is_told = not requests
            await asyncio.sleep(_POLL_S)

    async def _end_all(self) -> None:
        """End all requests. Those frozen by a pause make no step, and end by a pause in ``abort``.

        SIGTERM has released all pauses, and takes no new one.
        """
        tm, pauses = self._tokenizer_manager, self._frontend.pauses
        if not tm.is_pause or tm.gracefully_exit or pauses.sglangs.is_the_servers:
            tm.abort_request(abort_all=True)
            return
        grant = await pauses.pause(PauseBody(mode="abort"))
        await pauses.resume(ContinueBody(pause_id=grant.pause_id, torch_empty_cache=False))

    async def _requests(self) -> int:
        """Return the number of requests that run or wait."""
        ranks = await self._frontend.pauses.ask_status()
        return sum(rank.pause.running + rank.pause.waiting for rank in ranks)


@FRONT_PARTS.join()
def make_drain(frontend: Frontend, tokenizer_manager: TokenizerManager) -> Drain:
    return Drain(frontend, tokenizer_manager)


@HANDLERS.join()
def add_handler(frontend: Frontend, _: TokenizerManager, handlers: Handlers) -> Handlers:
    return handlers.with_more({"drain": frontend.part(Drain).call})


@ENDS.join()
async def drain_at_the_end(frontend: Frontend) -> None:
    deadline_s = read(DrainSettings).drain_s
    drain = frontend.part(Drain)
    if deadline_s is not None and drain.why is None:
        drain.begin(deadline_s, "SIGTERM")


@BEHIND.join()
@LEAVING.join()
def why_draining(frontend: Frontend) -> str | None:
    return frontend.part(Drain).why

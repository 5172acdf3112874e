"""Have the ranks of one replica send the weights that they serve, to other servers' ranks."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

from sglang_inflight.extensions.saves.messages import Listens, OfferCall, WithdrawCall
from sglang_inflight.extensions.saves.stream import TOKEN_BYTES
from sglang_inflight.frontend.frontend import HANDLERS, Frontend
from sglang_inflight.frontend.handlers import Handlers
from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.frontend.updates.two_phase import GRACE_S
from sglang_inflight.vocabulary.answers import Offered, RankOffered
from sglang_inflight.vocabulary.bodies import OfferBody, WithdrawBody
from sglang_inflight.vocabulary.errors import Conflict, RankSilent

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

_WITHDRAW_S = 10.0


class Offers:
    """Offers of one server. Lives on the front end's event loop."""

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        """``timeout_s``: how long an offer lasts whose call does not say it."""
        self._ranks = ranks
        self._timeout_s = timeout_s

    async def offer(self, body: OfferBody) -> Offered:
        """Return when every rank of one replica listens. Raises ``Conflict`` if versions differ."""
        seconds = body.timeout_s or self._timeout_s
        call = OfferCall(
            offer_id=uuid.uuid4().hex,
            token=secrets.token_hex(TOKEN_BYTES // 2),
            expected_version=body.expected_version,
            host=body.host,
            timeout_s=seconds,
        )
        try:
            answers = await self._ranks.call(call, seconds + GRACE_S)
            ranks = _ranks_of(answers)
        except BaseException:
            await asyncio.shield(self._give_up(call.offer_id))
            raise
        return Offered(
            message="The served weights are offered.",
            offer_id=call.offer_id,
            token=call.token,
            weight_version=answers[0].weight_version,
            seconds=seconds,
            ranks=ranks,
        )

    async def withdraw(self, body: WithdrawBody) -> None:
        """End an offer. One that has ended already stays so."""
        call = WithdrawCall(offer_id=body.offer_id)
        await self._ranks.call(call, _WITHDRAW_S + GRACE_S)

    async def _give_up(self, offer_id: str) -> None:
        # a silent rank ends the offer by its own time limit
        with suppress(RankSilent):
            await self._ranks.ask(WithdrawCall(offer_id=offer_id), _WITHDRAW_S + GRACE_S)


@HANDLERS.join()
def add_handlers(frontend: Frontend, _: TokenizerManager, handlers: Handlers) -> Handlers:
    offers = Offers(frontend.ranks, frontend.settings.update_timeout_s)
    return handlers.with_more(
        {
            "offer_served_weights": offers.offer,
            "withdraw_served_weights": offers.withdraw,
            "update_weights_from_peer": frontend.updates.update,
        }
    )


def _ranks_of(answers: list[Listens]) -> tuple[RankOffered, ...]:
    """Return the ranks that listen. Raises ``Conflict`` if their versions differ."""
    listening = [rank for rank in answers if rank.host is not None]
    versions = {rank.weight_version for rank in listening}
    if len(versions) > 1:
        raise Conflict(f"the ranks serve {' and '.join(sorted(versions))}: offer again")
    return tuple(
        RankOffered(
            tp_rank=rank.tp_rank,
            pp_rank=rank.pp_rank,
            host=rank.host,
            port=rank.port,
            digest=rank.digest,
        )
        for rank in listening
        if rank.host is not None
    )

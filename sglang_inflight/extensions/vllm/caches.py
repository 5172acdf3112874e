"""Flush caches of computed prompts on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from sglang_inflight.capabilities import now
from sglang_inflight.frontend.ranks import Ranks
from sglang_inflight.frontend.updates.version_record import clear_preprocessed
from sglang_inflight.messages import Call, Done, InflightCall
from sglang_inflight.scheduler.controller import CALLS, Controller, Handler
from sglang_inflight.scheduler.versions.kv_ages import forget_embeddings
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight.vocabulary.errors import Conflict, Refused

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

# A step may take long, and a flush waits for its end.
FLUSH_TIMEOUT_S = 120.0


class FlushCall(Call, kw_only=True):
    """Drop every cached prefix."""

    answer = Done
    at_boundary: ClassVar[bool] = True

    # retract running requests, because they hold KV; False refuses the call if any run
    retract: bool


class ForgetEmbeddingsCall(Call, kw_only=True):
    answer = Done


@CALLS.join()
def handlers_of_caches(controller: Controller) -> dict[type[InflightCall[Any]], Handler]:
    boundary = controller.boundary

    def flush(call: FlushCall) -> None:
        boundary.drain()
        running = len(boundary.requests.running())
        if running and not call.retract:
            raise Conflict(f"{running} running requests hold KV")
        boundary.retract()
        boundary.flush(empty_cache=False)
        controller.answers.succeed(call, Done())

    def forget(call: ForgetEmbeddingsCall) -> None:
        forget_embeddings()
        controller.answers.succeed(call, Done())

    return {FlushCall: flush, ForgetEmbeddingsCall: forget}


class Caches:
    """Forget prefixes, image embeddings and preprocessed images.

    Lives on the front end's event loop.
    """

    def __init__(
        self, tokenizer_manager: TokenizerManager, ranks: Ranks, can: Capabilities
    ) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._ranks = ranks
        self._can = can

    async def flush(self, *, retract: bool) -> None:
        """Forget every cached prefix, on every rank.

        ``retract`` sends running requests back to the queue, to be recomputed. Raises
        ``Conflict`` if ``retract`` is false and requests run. Raises ``Refused`` if the server's
        loop cannot retract, or a flush does not reach every tier of the cache.
        """
        if (reason := now(self._can).recompute) is not None:
            raise Refused(f"the cache cannot be flushed: {reason}")
        await self._ranks.carry_out(FlushCall(retract=retract), FLUSH_TIMEOUT_S)
        clear_preprocessed(self._tokenizer_manager)

    async def forget_embeddings(self) -> None:
        """Forget encoders' embeddings of images and other media, on every rank."""
        await self._ranks.carry_out(ForgetEmbeddingsCall(), FLUSH_TIMEOUT_S)

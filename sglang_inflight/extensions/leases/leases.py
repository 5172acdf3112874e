"""Leases on cached KV, from a turn's end to the next turn of a conversation.

A request with ``kv_lease_s`` leaves its KV in the prefix cache, as any request. The lease keeps it
from being the least recently used: its prefix is touched again before evictions can reach it. A
lease locks nothing. Where running requests need all memory, leased KV is evicted after all other
KV. A lease ends with its time, or with the next turn's own lease. The oldest end when all leases
together are over the budget.

A commit may put leased KV over its bound (``scheduler/versions/kv_ages.py``). The next turn could
not use it then. While this server has nothing else to do, it computes the conversation's KV again,
by a request of its own that samples one token and answers nobody. KV of an adapter is not computed
again, because the adapter may be unloaded by then.

**All ranks do the same.** Leases follow from requests. The first rank's clock alone ends them: it
sends a message to the ranks of its replica, as SGLang does with a request's time limit.

Only the scheduler's thread runs this module.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.schedule_batch import Req as Request
from sglang.srt.mem_cache.common import _req_radix_key
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.utils import TypeBasedDispatcher

from sglang_inflight.extensions.leases import KV_LEASE_S, LeasesSettings
from sglang_inflight.extensions.leases.messages import LeasesOver
from sglang_inflight.hooking import AFTER, AROUND, KV, SCHEDULER, hook
from sglang_inflight.metrics import Metrics
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.controller import BOUNDARIES, PARTS, Controller
from sglang_inflight.scheduler.pause.machine import PauseState
from sglang_inflight.scheduler.pause.pause import Pause
from sglang_inflight.scheduler.versions.kv_ages import KVAges, own_key
from sglang_inflight.scheduler.versions.kv_versions import count_slots
from sglang_inflight.settings import read
from sglang_inflight.vocabulary.contracts import custom_param
from sglang_inflight.vocabulary.kept_kv import KV_MAX_AGE

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_inflight.sglang_types import Scheduler

# steps between two touches: evictions of some steps do not reach what was touched before them
_TOUCH_EVERY = 32


@dataclass
class Lease:
    """A conversation's cached KV. The key of ``req`` names the KV."""

    # never queued, or ended: what holds more than the lease needs, such as log-probabilities, goes
    req: Req
    # a time of this rank's clock
    ends_at: float
    # name of the lease: the id of the request that left it
    rid: str


class Leases:
    """The leases of one scheduler, the oldest first."""

    def __init__(
        self,
        scheduler: Scheduler,
        boundary: Boundary,
        pause: Pause,
        ages: KVAges,
        metrics: Metrics,
        *,
        most_tokens: int,
    ) -> None:
        self._scheduler = scheduler
        self._boundary = boundary
        self._pause = pause
        self._ages = ages
        self._most_tokens = most_tokens
        self._leases: list[Lease] = []
        self._steps = 0
        self._serial = itertools.count()
        # the lease whose KV is computed again, and the request that does it
        self._renewing: tuple[Lease, Req] | None = None
        self._leased = metrics.gauge(
            "sglang:inflight_leased_tokens", "Tokens of cached KV that leases keep."
        )
        self._renewed = metrics.counter(
            "sglang:inflight_lease_refreshed_tokens",
            "Tokens of leased conversations computed again in idle time.",
        )
        self._leased.set(0)

    # ---- their ends ------------------------------------------------------------------

    def take(self, req: Req) -> None:
        """Begin a lease if ``req`` has ended, and asks for one."""
        if not req.finished():
            return
        aborted = isinstance(req.finished_reason, FINISH_ABORT)
        if self._renewing is not None and self._renewing[1] is req:
            self._end_renewal(is_whole=not aborted)
            return
        seconds = custom_param(req.sampling_params, KV_LEASE_S)
        if seconds is None or aborted:
            return
        output = req.output_ids_through_stop
        # the last token was sampled, and its KV never computed
        tokens = req.origin_input_ids + output[: max(0, len(output) - 1)]
        kept = self._stand_in(req, tokens)
        self._leases = [each for each in self._leases if not _continues(kept, each.req)]
        self._leases.append(Lease(kept, time.monotonic() + seconds, req.rid))
        while self._count() > self._most_tokens:
            del self._leases[0]
        self._leased.set(self._count())

    def end(self, over: LeasesOver) -> None:
        self._leases = [each for each in self._leases if each.rid not in over.rids]
        self._leased.set(self._count())

    @hook(
        f"{SCHEDULER}._poll_timeout_aborts",
        AROUND,
        order=1,
        via=lambda scheduler: scheduler.inflight.part(Leases),
    )
    def look_at_the_clock(self, poll: Callable[[], list[Any]]) -> list[Any]:
        """Add the leases that have expired. SGLang asks the first rank alone."""
        now = time.monotonic()
        rids = [each.rid for each in self._leases if each.ends_at <= now]
        return [*poll(), *([LeasesOver(rids=rids)] if rids else [])]

    def _count(self) -> int:
        """Return the tokens of all leases, those of shared beginnings once for each lease."""
        return sum(len(each.req.origin_input_ids) for each in self._leases)

    # ---- between steps ---------------------------------------------------------------

    def settle(self) -> None:
        """Touch what is leased, and compute again what is too old. Called between steps."""
        if not self._leases:
            return
        self._steps += 1
        if self._steps % _TOUCH_EVERY == 0:
            self._touch()
        if self._is_idle():
            if self._renewing is not None:
                # an abort took it from the queue
                self._end_renewal(is_whole=False)
            old = next((each for each in self._leases if self._is_renewable(each.req)), None)
            if old is not None:
                self._renew(old)

    def _is_renewable(self, req: Req) -> bool:
        return req.lora_id is None and self._ages.is_too_old(req)

    def _touch(self) -> None:
        tree_cache = self._scheduler.tree_cache
        # the newest lease is touched last, so that the oldest is evicted first
        for each in self._leases:
            if not self._ages.is_too_old(each.req):
                tokens = each.req.origin_input_ids
                tree_cache.touch_prefix(_req_radix_key(tree_cache, each.req, tokens))

    def _is_idle(self) -> bool:
        scheduler = self._scheduler
        return (
            self._pause.state is PauseState.RUNNING
            and scheduler.running_batch.is_empty()
            and not scheduler.waiting_queue
            and not scheduler.grammar_manager.grammar_queue
            and not self._boundary.requests.running()
        )

    def _renew(self, lease: Lease) -> None:
        req = self._stand_in(lease.req, lease.req.origin_input_ids)
        # nobody waits for an answer
        req.finished_output = True  # type: ignore[assignment]
        self._renewing = lease, req
        self._renewed.inc(len(req.origin_input_ids))
        self._scheduler._add_request_to_queue(req)

    def _stand_in(self, last: Req, tokens: array[int]) -> Req:
        """Return a request for the KV of ``tokens``, with the key and the bound of ``last``."""
        most = custom_param(last.sampling_params, KV_MAX_AGE)
        params = SamplingParams(
            max_new_tokens=1,
            temperature=0.0,
            custom_params=None if most is None else {KV_MAX_AGE: most},
        )
        params.normalize(None)
        req = Request(
            rid=f"inflight-lease-{next(self._serial)}",
            origin_input_text="",
            origin_input_ids=tokens,
            sampling_params=params,
            cache_salt=last.cache_salt,
            priority=last.priority,
            eos_token_ids=last.eos_token_ids,
            vocab_size=last.vocab_size,
        )
        # the key has the adapter
        req.lora_id, req.extra_key = last.lora_id, last.extra_key
        self._ages.trust_key(req)
        return req

    def _end_renewal(self, *, is_whole: bool) -> None:
        assert self._renewing is not None
        (lease, req), self._renewing = self._renewing, None
        if is_whole:
            lease.req = req
        else:
            self._leases = [each for each in self._leases if each is not lease]
            self._leased.set(self._count())


def _continues(req: Req, earlier: Req) -> bool:
    """Return whether ``req`` is of a later turn of the conversation of ``earlier``."""
    if own_key(req) != own_key(earlier) or req.cache_salt != earlier.cache_salt:
        return False
    tokens, beginning = req.origin_input_ids, earlier.origin_input_ids
    last = len(beginning) - 1
    is_possible = 0 <= last < len(tokens) and tokens[last] == beginning[last]
    return is_possible and tokens[: last + 1] == beginning


@PARTS.join()
def make_leases(controller: Controller) -> Leases:
    most = read(LeasesSettings).kv_lease_tokens
    scheduler = controller.scheduler
    leases = Leases(
        scheduler,
        controller.boundary,
        controller.pause,
        controller.ages,
        controller.metrics,
        most_tokens=count_slots(scheduler.token_to_kv_pool_allocator) // 4
        if most is None
        else most,
    )
    scheduler._request_dispatcher += TypeBasedDispatcher([(LeasesOver, leases.end)])
    return leases


@BOUNDARIES.join()
def settle(controller: Controller) -> Callable[[], None]:
    return controller.part(Leases).settle


@hook(f"{KV}.release_kv_cache", AFTER, order=1)
def lease(_: None, req: Req, tree_cache: Any, *args: Any, **kwargs: Any) -> None:
    """Begin a lease where SGLang has cached an ended request's KV."""
    controller: Controller | None = getattr(tree_cache.req_to_token_pool, "inflight", None)
    if controller is not None:
        controller.part(Leases).take(req)

"""Spreads the recomputation of too old KV over steps.

A request whose KV is over its bound (``scheduler/versions/kv_ages.py``) is retracted, and goes to
the front of the queue. SGLang prefills it again, as after any retraction. So pauses, aborts, pins,
priorities and a lack of memory meet an ordinary waiting request.

**When.** ``hard`` retracts all such requests at the commit, and they wait for their turn. ``soft``
leaves them running, and retracts the oldest ones at a step boundary when no earlier one is still
being recomputed: as many as the budget takes, at least one.

**How much.** A step prefills at most ``tokens`` of such requests. A request that is longer becomes
SGLang's chunked request, with chunks of the budget. Each ``PrefillAdder`` belongs to one step and
counts what it has admitted. SGLang has one chunked request at a time, and takes for granted that a
chunk takes the whole rest of a step. A chunk of the budget leaves tokens to others. So a second
chunk is refused, and others join the step whole, or wait. The budget is rounded up to what SGLang
can cut.

**Beside decoding.** SGLang prefills before it decodes. After a prefill of such requests alone, the
next step decodes.

**No request starves.** Recomputed requests are in front of the queue in the order of their ages.
Each step tries the first one with a whole budget. If memory has no room for it, SGLang admits
nobody behind it.

The choice depends on requests, ages, the cache and earlier steps, which are the same on all ranks
of a replica. Only the scheduler's thread runs this module.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_inflight.extensions.refresh import RefreshSettings
from sglang_inflight.hooking import AFTER, AROUND, SCHEDULER, hook
from sglang_inflight.metrics import Metrics
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.controller import (
    BOUNDARIES,
    CHOICES,
    COMMITS,
    OVERDUE,
    PARTS,
    Controller,
    MayRun,
)
from sglang_inflight.scheduler.pause.machine import PauseState
from sglang_inflight.scheduler.pause.pause import Pause
from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.scheduler.versions.kv_ages import count_cached
from sglang_inflight.scheduler.versions.token_versions import Versions
from sglang_inflight.settings import read

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import PrefillAdder

    from sglang_inflight.sglang_types import Scheduler

_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
# commits, as labels of metrics: the last one is open
_AGES = (0, 1, 2, 3, 4, 8, 16)


class Refresh:
    """Chooses whose old KV one scheduler recomputes in a step."""

    def __init__(
        self,
        scheduler: Scheduler,
        boundary: Boundary,
        pause: Pause,
        versions: Versions,
        metrics: Metrics,
        *,
        tokens: int | None,
        is_soft: bool,
    ) -> None:
        """``tokens``: the budget of a step; None for no bound."""
        self._scheduler = scheduler
        self._boundary = boundary
        self._pause = pause
        self._versions = versions
        self._tokens = None if tokens is None else round_up(tokens, least_cut(scheduler))
        self._is_soft = is_soft
        # epochs of the KV of running requests over their bound, the oldest first; with soft alone
        self._due: dict[Req, int] = {}
        # whether the last prefill was of requests that recompute old KV, and of no other
        self._owes_decode = False
        self._refreshed = metrics.counter(
            "sglang:inflight_refreshed_tokens",
            "Tokens of running requests computed again because of their KV's age.",
        )
        self._tokens_by_age = metrics.gauges(
            "sglang:inflight_kv_tokens",
            "Tokens of running requests at the last commit, by the age of their KV in commits.",
            "age",
        )
        self._hits_by_age = metrics.counters(
            "sglang:inflight_kv_hit_tokens",
            "Cached tokens that requests began with, by their age in commits.",
            "age",
        )

    # ---- when ------------------------------------------------------------------------

    def choose(self, over: list[Req]) -> list[Req]:
        """Return which of the requests with too old KV recompute it at the commit."""
        if not self._is_soft:
            return over
        # a later commit finds the earlier ones again, and may find older KV
        due = {req: record_of(req).kv_epoch for req in over}
        self._due = due | {req: epoch for req, epoch in self._due.items() if req not in due}
        return []

    def settle(self) -> None:
        """Retract the oldest due requests if no retracted one is waiting. Called between steps."""
        is_running = self._pause.state is PauseState.RUNNING
        if not self._due or not is_running or self._boundary.refreshing():
            return
        running = self._boundary.requests.running()
        # the others have ended, or were retracted meanwhile and found KV that is young enough
        self._due = {
            req: epoch
            for req, epoch in self._due.items()
            if req in running and record_of(req).kv_epoch == epoch
        }
        chosen: list[Req] = []
        tokens = 0
        for req in self._due:
            if self._tokens is not None and tokens >= self._tokens:
                break
            chosen.append(req)
            tokens += req.seqlen
        for req in chosen:
            del self._due[req]
        if chosen:
            self._boundary.refresh(chosen)

    # ---- how much --------------------------------------------------------------------

    def choice(self) -> MayRun | None:
        """Return which retracted requests a step shows SGLang; None if it may show all."""
        if self._tokens is None or not (begun := self._boundary.refreshing()):
            return None
        left, chunked = self._tokens, self._scheduler.chunked_req
        if chunked is not None and record_of(chunked).is_refreshing:
            left -= min(left, chunked.seqlen - chunked.prefix_len)
        shown: set[Req] = set()
        for req in begun:
            if left <= 0:
                break
            if req is chunked:
                continue
            tokens = req.seqlen - count_cached(req, self._scheduler.tree_cache)
            if chunked is not None and tokens > left:
                break
            shown.add(req)
            left -= tokens
        return lambda req: not record_of(req).is_refreshing or req in shown

    def within(self, adder: PrefillAdder, req: Req, add: Callable[[], Any]) -> Any:
        """Let ``adder`` admit ``req``, with at most the rest of the step's budget."""
        if not record_of(req).is_refreshing:
            return add()
        admitted = len(adder.can_run_list)
        before = adder.rem_chunk_tokens
        if self._tokens is None or before is None:
            added = add()
        else:
            # an adder lives for one step
            spent: int = getattr(adder, "inflight_refreshed", 0)
            limit = min(before, self._tokens - spent)
            adder.rem_chunk_tokens = limit
            added = add()
            used = limit - adder.rem_chunk_tokens
            adder.inflight_refreshed = spent + used  # type: ignore[attr-defined]
            adder.rem_chunk_tokens = before - used
        if len(adder.can_run_list) > admitted:
            self._refreshed.inc(req.extend_len)
            if isinstance(added, AddReqResult):
                # the budget's end is no reason to admit no other request
                return adder.budget_state()
        return added

    # ---- how old ---------------------------------------------------------------------

    def observe(self) -> None:
        """Show how old the KV of running requests is. Called at a commit."""
        tokens = dict.fromkeys(map(name_age, (*_AGES, _AGES[-1] + 1)), 0)
        for req in self._boundary.requests.running():
            tokens[name_age(self._age(req))] += req.kv.kv_committed_len
        for age, count in tokens.items():
            self._tokens_by_age(age).set(count)

    def observe_hit(self, req: Req) -> None:
        if req.prefix_len:
            self._hits_by_age(name_age(self._age(req))).inc(req.prefix_len)

    def _age(self, req: Req) -> int:
        return self._versions.epoch - record_of(req).kv_epoch

    # ---- beside decoding -------------------------------------------------------------

    @hook(
        f"{SCHEDULER}.get_new_batch_prefill",
        AFTER,
        order=1,
        via=lambda scheduler: scheduler.inflight.part(Refresh),
    )
    def note_prefill(self, plan: NextBatchPlan, *args: Any, **kwargs: Any) -> None:
        batch = plan.batch_to_run
        self._owes_decode = batch is not None and all(
            record_of(req).is_refreshing for req in batch.reqs
        )

    @hook(
        f"{SCHEDULER}._should_defer_prefill",
        AROUND,
        via=lambda scheduler: scheduler.inflight.part(Refresh),
    )
    def defers_prefill(self, defers: Callable[..., bool], *running_batch: ScheduleBatch) -> bool:
        """Return whether this step decodes, also because the last step recomputed old KV.

        SGLang 0.5.22 names no batch.
        """
        owed, self._owes_decode = self._owes_decode, False
        running = running_batch[0] if running_batch else self._scheduler.running_batch
        owed = owed and self._tokens is not None and not running.is_empty()
        return defers(*running_batch) or owed


def round_up(tokens: int, cut: int) -> int:
    return -(-tokens // cut) * cut


def least_cut(scheduler: Scheduler) -> int:
    """Return the shortest chunk, in tokens: SGLang cuts at pages, or at larger tiles."""
    return max(scheduler.page_size, scheduler.truncation_align_size or 1)


def name_age(age: int) -> str:
    """Return the label of an age: "0" to "4", "5-8", "9-16" and "17+"."""
    for less, most in pairwise(_AGES):
        if age <= less:
            return f"{less}"
        if age <= most:
            return f"{most}" if most == less + 1 else f"{less + 1}-{most}"
    return f"{_AGES[-1] + 1}+"


def refresh_of(adder: PrefillAdder) -> Refresh | None:
    """Return our part of the scheduler of ``adder``; None without one."""
    # SGLang's own tests have caches without a pool
    pool = getattr(adder.tree_cache, "req_to_token_pool", None)
    controller: Controller | None = getattr(pool, "inflight", None)
    return None if controller is None else controller.part(Refresh)


@hook(f"{_ADDER}.add_one_req", AROUND)
def add_one(
    add: Callable[..., Any], adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any
) -> Any:
    """Admit ``req`` to a step's prefill, within the budget if it recomputes old KV."""
    refresh, admitted = refresh_of(adder), len(adder.can_run_list)
    if refresh is None:
        return add(adder, req, *args, **kwargs)

    def add_now() -> Any:
        # without a prefix cache SGLang may choose without ``_select_prefill_admission``
        selects = not getattr(adder.tree_cache, "disable", True)
        if selects or not has_chunk(adder) or fits_whole(adder, req):
            return add(adder, req, *args, **kwargs)
        return AddReqResult.OTHER

    added = refresh.within(adder, req, add_now)
    if len(adder.can_run_list) > admitted:
        refresh.observe_hit(req)
    return added


@hook(f"{_ADDER}.add_chunked_req", AROUND)
def add_chunk(
    add: Callable[..., Any], adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any
) -> Any:
    """Admit the next chunk of ``req``, within the budget if it recomputes old KV."""
    refresh = refresh_of(adder)
    if refresh is None:
        return add(adder, req, *args, **kwargs)
    unfinished = refresh.within(adder, req, lambda: add(adder, req, *args, **kwargs))
    adder.inflight_has_chunk = unfinished is not None  # type: ignore[attr-defined]
    return unfinished


@hook(f"{_ADDER}._select_prefill_admission", AROUND)
def refuse_second_chunk(
    select: Callable[..., Any], adder: PrefillAdder, *args: Any, **kwargs: Any
) -> Any:
    """Refuse a chunk in a step that has one. Nothing is allocated yet."""
    admission = select(adder, *args, **kwargs)
    is_chunk = not isinstance(admission, AddReqResult) and admission.is_chunked
    return AddReqResult.OTHER if is_chunk and has_chunk(adder) else admission


def has_chunk(adder: PrefillAdder) -> bool:
    """Return whether the step has a request that goes on with another chunk."""
    return adder.new_chunked_req is not None or getattr(adder, "inflight_has_chunk", False)


def fits_whole(adder: PrefillAdder, req: Req) -> bool:
    left = adder.rem_chunk_tokens
    return left is None or len(req.full_untruncated_fill_ids) - req.prefix_len <= left


@PARTS.join()
def make_refresh(controller: Controller) -> Refresh:
    settings = read(RefreshSettings)
    return Refresh(
        controller.scheduler,
        controller.boundary,
        controller.pause,
        controller.versions,
        controller.metrics,
        tokens=settings.kv_refresh_tokens_per_step,
        is_soft=settings.kv_refresh == "soft",
    )


@OVERDUE.join()
def choose(controller: Controller, over: list[Req]) -> list[Req]:
    return controller.part(Refresh).choose(over)


@COMMITS.join(order=2)
def observe(controller: Controller) -> None:
    controller.part(Refresh).observe()


@BOUNDARIES.join()
def settle(controller: Controller) -> Callable[[], None]:
    return controller.part(Refresh).settle


@CHOICES.join()
def choice(controller: Controller) -> Callable[[], MayRun | None]:
    return controller.part(Refresh).choice

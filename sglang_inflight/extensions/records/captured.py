"""Keeps what forwards captured for the tokens of a request, across a retraction.

SGLang captures the routes of a mixture of experts, and the positions that a sparse attention's
indexer chose. It keeps one row for each slot of the KV pool. At a request's end it reads the rows
of the request's slots. The forward that computes position ``p`` captures row ``p``, and samples
token ``p + 1``. The last token has no row.

At the end a request's slots may hold rows of other forwards than those that sampled its tokens:

- After a retraction one prefill computes all positions again. So the rows are read before the slots
  are freed, and written over the later ones at the request's end. A request that ends without KV
  has these rows alone.
- After a prefill the prefix cache may hold the prompt already, perhaps by older weights. Then the
  request continues on the cached slots. So the row of the prefill's last position is read before.

Only rows of sampled tokens matter, so a request without a token keeps none. A request with
``records="recomputed"`` gets the rows of its slots instead. If it ends without KV, it gets the rows
of its last slots.

Threads and streams: rows are host memory. Only the scheduler's thread writes and reads them. It
writes a forward's rows with the forward's result, after the event of their copy to the host.
Without overlap scheduling it writes them right after the forward. A kept position comes before the
last token, so the result with its row has been processed. A retraction for lack of memory may
precede the result of one launched forward. That forward computes the last token's position, and its
row is not kept. Slot ids are read on the scheduler's stream, where slots are allocated. The host
waits for this read once a prefill and once a retraction, only for requests that ask for rows.

A decode server has not computed the prompt. Its rows of the prompt's positions are -1; the prefill
server's answer has them.

Memory: one row for each position of a retracted request, until the request's end.

This module hooks ``Req.reset_for_retract``, ``checkpoint_kv_cache``, and a prefill server's release
of a prompt computed too soon.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

from sglang_inflight.hooking import AFTER, BEFORE, KV, PREFILL_SCHEDULER, REQ, hook
from sglang_inflight.messages import RECORDS, Records
from sglang_inflight.scheduler.controller import PARTS, Controller
from sglang_inflight.scheduler.outputs import LAST_OUTPUTS, OUTPUTS
from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.scheduler.slots import RELEASES
from sglang_inflight.vocabulary.contracts import custom_param

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.state_capturer.base import BaseTopkCapturer

    from sglang_inflight.scheduler.patched_types import PatchedReqToTokenPool
    from sglang_inflight.sglang_types import Scheduler


# takes the place of an index, in each element of a row captured on another server
_UNKNOWN = -1


@dataclass(slots=True)
class Rows:
    """Rows captured by forwards, of the positions from ``start`` on."""

    start: int
    # int32, on the host, of shape (positions, layers, top-k)
    rows: torch.Tensor


@dataclass(slots=True)
class Captured:
    """Rows of one kind that ``CapturedRows`` keeps for one request."""

    # rows from the first position of the answer on, read at the last retraction
    kept: torch.Tensor | None = None
    # row of the last position of the last prefill
    last: Rows | None = None


class _OfRequest(dict[str, Captured]):
    """Captured rows of a request's earlier forwards, by the name of the request's attribute."""


@dataclass(frozen=True)
class _Wanted:
    """One kind of rows that a request asks for."""

    # the request's attribute with the rows
    name: str
    capturer: BaseTopkCapturer
    # first position of the answer
    start: int


def _wanted(req: Req) -> Iterator[_Wanted]:
    experts, indexer = get_global_experts_capturer(), get_global_indexer_capturer()
    if req.return_routed_experts and experts is not None:
        yield _Wanted("routed_experts", experts, req.routed_experts_start_len)
    if req.return_indexer_topk and indexer is not None:
        yield _Wanted("indexer_topk", indexer, 0)


def records_of(req: Req) -> Records | None:
    """Return which rows the answer of ``req`` has, or None without rows."""
    if next(_wanted(req), None) is None:
        return None
    asked: Records | None = custom_param(req.sampling_params, RECORDS)
    return asked or "sampled"


class CapturedRows:
    """Reads captured rows off a request's slots, and puts them into its answer.

    Only the scheduler's thread touches this.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def keep_last(self, req: Req) -> None:
        """Keep the row of the newest token's forward, before the prefix cache takes its slot."""
        if records_of(req) != "sampled":
            return
        newest = _sampled(req) - 1
        for wanted in _wanted(req):
            captured = _captured(req, wanted)
            # a chunk of a later prefill samples nothing, and its newest token has its row
            if newest >= _end(wanted, captured):
                captured.last = Rows(newest, self._read(req, wanted, newest, newest + 1))

    def keep(self, req: Req) -> None:
        """Keep the rows of ``req``, before a retraction frees its slots."""
        sampled = _sampled(req)
        computed = min(sampled, req.kv.kv_committed_len)
        for wanted in _wanted(req) if sampled else ():
            captured = _captured(req, wanted)
            if records_of(req) == "sampled":
                self._append(req, wanted, captured, computed)
            elif computed == sampled:
                captured.kept = self._read(req, wanted, wanted.start, sampled)

    def _append(self, req: Req, wanted: _Wanted, captured: Captured, end: int) -> None:
        """Append the rows captured since the last retraction, up to position ``end``."""
        begin = _end(wanted, captured)
        last, captured.last = captured.last, None
        if begin >= end:
            return
        rows = self._read(req, wanted, begin, end)
        if last is not None:
            _put(last, rows, begin)
        captured.kept = rows if captured.kept is None else torch.cat((captured.kept, rows))

    def _read(self, req: Req, wanted: _Wanted, begin: int, end: int) -> torch.Tensor:
        """Return a copy of the rows of positions ``begin`` to ``end`` - 1."""
        assert req.kv.req_pool_idx is not None
        # SGLang counts the last token, which has no row
        return wanted.capturer.get_topk(
            req.kv.req_pool_idx, end + 1, self._scheduler.req_to_token_pool, begin
        )

    def put_back(self, req: Req) -> None:
        """Complete the rows of a finished request, before its last output is sent."""
        for wanted in _wanted(req):
            rows = self._complete(req, wanted, getattr(req, wanted.name))
            if (
                rows is not None
                and self._scheduler.disaggregation_mode is DisaggregationMode.DECODE
            ):
                rows[: max(0, len(req.origin_input_ids) - wanted.start)] = _UNKNOWN
            setattr(req, wanted.name, rows)
        forget(req)

    def _complete(
        self, req: Req, wanted: _Wanted, found: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the rows of the answer; ``found`` are those of the slots, if ``req`` has any."""
        captured = _captured(req, wanted)
        if found is None:
            return captured.kept
        if records_of(req) == "sampled":
            if captured.kept is not None:
                _put(Rows(wanted.start, captured.kept), found, wanted.start)
            if captured.last is not None:
                _put(captured.last, found, wanted.start)
        return found


@PARTS.join()
def make_captured_rows(controller: Controller) -> CapturedRows:
    return CapturedRows(controller.scheduler)


@RELEASES.join()
def keep_before_release(controller: Controller, req: Req) -> None:
    if not req.finished():
        controller.part(CapturedRows).keep(req)


@LAST_OUTPUTS.join()
def complete(controller: Controller, ended: list[Req]) -> None:
    for req in ended:
        controller.part(CapturedRows).put_back(req)


@OUTPUTS.join()
def say_which_rows(_: Controller, reqs: list[Req]) -> dict[str, list[Any]]:
    return {RECORDS: [records_of(req) if req.finished() else None for req in reqs]}


@hook(f"{KV}.checkpoint_kv_cache", BEFORE)
def keep_before_caching(req: Req, tree_cache: Any) -> None:
    pool: PatchedReqToTokenPool = tree_cache.req_to_token_pool
    pool.inflight.part(CapturedRows).keep_last(req)


@hook(f"{REQ}.reset_for_retract", AFTER, order=1)
def forget_without_tokens(_: None, req: Req) -> None:
    """Drop the kept rows of a request that begins anew, after ``mends`` has kept its output."""
    if not req.output_ids:
        forget(req)


@hook(f"{PREFILL_SCHEDULER}.optimistic_release_and_requeue", AFTER)
def forget_a_prompt_computed_too_soon(_: None, scheduler: Scheduler, req: Req) -> None:
    forget(req)


def forget(req: Req) -> None:
    """Drop the kept rows: ``req`` has ended, or begins anew without its tokens."""
    record_of(req).part(_OfRequest).clear()


def _sampled(req: Req) -> int:
    """Return the number of positions before the last token of ``req``, or 0 without a token."""
    tokens = len(req.output_ids_through_stop)
    return len(req.origin_input_ids) + tokens - 1 if tokens else 0


def _captured(req: Req, wanted: _Wanted) -> Captured:
    return record_of(req).part(_OfRequest).setdefault(wanted.name, Captured())


def _end(wanted: _Wanted, captured: Captured) -> int:
    """Return the position behind the kept rows."""
    return wanted.start + (0 if captured.kept is None else len(captured.kept))


def _put(rows: Rows, onto: torch.Tensor, start: int) -> None:
    """Write ``rows`` onto rows that begin at position ``start``, as far as both have them."""
    at = rows.start - start
    both = max(0, min(len(rows.rows), len(onto) - at))
    onto[at : at + both] = rows.rows[:both]

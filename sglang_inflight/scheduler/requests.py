"""Which requests a scheduler has, where they are, and this package's record of each.

A request is running, waiting, or between two servers.

Under overlap scheduling the last batch is launched, but its result may still be queued.
``boundary.py`` processes it.

The record is the attribute ``inflight`` of SGLang's ``Req``. One ``Req`` serves a request from its
arrival to its end. A retraction resets SGLang's own fields and leaves ``inflight``. Batches share
the ``Req``, and no ``Req`` is copied or crosses a process. With prefill-decode disaggregation each
of the two servers makes its own ``Req`` and record. The record ends with its ``Req``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_inflight.sglang_types import get_parallel

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_inflight.sglang_types import Scheduler

    class _AdoptedReq(Req):
        inflight: RequestRecord


P = TypeVar("P")


class Requests:
    """The census of one scheduler's requests. It changes none of them.

    Only the scheduler's thread calls this, at a step boundary or while it processes a result.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # batches that an extension keeps from the loop for some steps. Their requests are running
        self.parked_batches: list[ScheduleBatch] = []

    @property
    def pending_batches(self) -> list[ScheduleBatch]:
        """Launched batches with unprocessed results, oldest first.

        The same objects are later passed to ``process_batch_result``.
        """
        if get_parallel().pp_size > 1:
            return self._pending_microbatches()
        return [batch for batch, _ in self.result_queue]

    @property
    def result_queue(self) -> Sequence[tuple[ScheduleBatch, Any]]:
        # the normal loop has no queue: it processes a result before the next boundary
        return getattr(self._scheduler, "result_queue", ())

    def _pending_microbatches(self) -> list[ScheduleBatch]:
        """Return the microbatches in flight: all but the current turn's."""
        scheduler = self._scheduler
        microbatches, turn = len(scheduler.running_mbs), self.turn
        pending = []
        for index in (*range(turn + 1, microbatches), *range(turn)):
            batch, launch = scheduler.mbs[index], scheduler.mb_metadata[index]
            if batch is not None:
                snapshot = launch.fwd_batch if launch is not None else None
                pending.append(batch if snapshot is None else snapshot)
        return pending

    @property
    def turn(self) -> int:
        """Index of the microbatch whose turn the pipeline's loop is in."""
        running = self._scheduler.running_mbs
        return next(i for i, batch in enumerate(running) if batch is self._scheduler.running_batch)

    def live(self) -> set[Req]:
        """Return every request of this scheduler, in any queue or batch."""
        scheduler = self._scheduler
        batches = [
            *scheduler._collect_inflight_batches(),
            scheduler.cur_batch_for_debug,
            *self.pending_batches,
        ]
        live = {req for batch in batches if batch is not None for req in batch.reqs}
        live.update(scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue)
        # a diffusion model's requests, also between two of their batches
        live.update(scheduler.dllm_manager.waiting_queue)
        if scheduler.chunked_req is not None:
            live.add(scheduler.chunked_req)
        live.update(self.backed_up())
        live.update(self.between_servers())
        return live

    def backed_up(self) -> list[Req]:
        """Return prefilled requests that wait, in no batch, for HiSparse to back up their KV."""
        coordinator = self._scheduler.hisparse_coordinator
        return [] if coordinator is None else [act.req for act in coordinator.ack_staging_queue]

    def between_servers(self) -> Iterator[Req]:
        """Yield the requests in the queues of a prefill server, or of a decode server."""
        scheduler = self._scheduler
        if scheduler.disaggregation_mode is DisaggregationMode.PREFILL:
            yield from scheduler.disagg_prefill_bootstrap_queue.queue
            yield from scheduler.disagg_prefill_inflight_queue
        elif scheduler.disaggregation_mode is DisaggregationMode.DECODE:
            prealloc = scheduler.disagg_decode_prealloc_queue
            yield from prealloc.retracted_queue
            # retracted by a pause: their prompts are prefilled again when generation continues
            yield from prealloc.held_rebootstrap_reqs
            transfers = scheduler.disagg_decode_transfer_queue.queue
            yield from (entry.req for entry in (*prealloc.queue, *transfers))

    def running(self) -> set[Req]:
        """Return the unfinished requests admitted to a batch."""
        scheduler = self._scheduler
        admitted = scheduler.collect_inflight_reqs()
        if scheduler.chunked_req is not None:
            admitted.add(scheduler.chunked_req)
        admitted.update(self.backed_up())
        if scheduler.disaggregation_mode is DisaggregationMode.PREFILL:
            # they run until the decode server has their KV
            admitted.update(scheduler.disagg_prefill_inflight_queue)
        return {req for req in admitted if not req.finished() and not req.is_retracted}

    def begun(self) -> set[Req]:
        """Return the requests that a draining pause lets finish.

        On a decode server these include requests with KV and no slot yet, and requests moved
        to the host for lack of memory. Held back, they would keep memory from running requests.
        """
        scheduler = self._scheduler
        begun = self.running()
        if scheduler.disaggregation_mode is DisaggregationMode.DECODE:
            begun.update(scheduler.disagg_decode_prealloc_queue.retracted_queue)
            begun.update(req for req in self.live() if req.kv.holds_kv)
        return begun

    def waiting(self) -> list[Req]:
        """Return the queued requests, without those whose KV is in transfer to this server."""
        scheduler = self._scheduler
        waiting = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
        if scheduler.disaggregation_mode is DisaggregationMode.PREFILL:
            waiting += scheduler.disagg_prefill_bootstrap_queue.queue
        elif scheduler.disaggregation_mode is DisaggregationMode.DECODE:
            prealloc = scheduler.disagg_decode_prealloc_queue
            waiting += [entry.req for entry in prealloc.queue]
            waiting += prealloc.held_rebootstrap_reqs
            waiting += prealloc.retracted_queue
        return waiting

    @property
    def may_be_written_to(self) -> bool:
        """Whether the prefill server may still write the KV of an ended request.

        SGLang keeps the memory until the prefill server says no, for 30 s at most.
        """
        scheduler = self._scheduler
        return (
            scheduler.disaggregation_mode is DisaggregationMode.DECODE
            and scheduler.disagg_decode_transfer_queue.has_pending_deferred_releases()
        )

    def why_not_recomputed(self) -> str | None:
        """Return why some KV must stay, or None where all KV can be recomputed."""
        scheduler = self._scheduler
        if scheduler.disaggregation_mode is DisaggregationMode.NULL:
            return None
        have_kv = {req for req in self.live() if req.kv.holds_kv}
        if scheduler.disaggregation_mode is DisaggregationMode.DECODE:
            # their KV is on the host, or in transfer
            have_kv.update(scheduler.disagg_decode_prealloc_queue.retracted_queue)
            have_kv.update(entry.req for entry in scheduler.disagg_decode_transfer_queue.queue)
        holding = len(have_kv) + self.may_be_written_to
        if not holding:
            return None
        return (
            f"{holding} requests have KV, and this server cannot recompute it: a prefill server "
            "computes KV for a decode server (--disaggregation-mode)"
        )

    def without_kv(self) -> list[Req]:
        """Return the queued requests, here or for another server, without a prefix lookup yet."""
        scheduler = self._scheduler
        if scheduler.disaggregation_mode is DisaggregationMode.DECODE:
            # a decode server's waiting queue holds requests with their prompt's KV
            asked_for = [entry.req for entry in scheduler.disagg_decode_prealloc_queue.queue]
            held = scheduler.disagg_decode_prealloc_queue.held_rebootstrap_reqs
            return [*asked_for, *held, *scheduler.grammar_manager.grammar_queue]
        return self.waiting()


Spans = list[dict[str, Any]]


@dataclass(slots=True)
class RequestRecord:
    """Only the scheduler's thread touches it."""

    # versions of the KV used by a finished request
    kv_versions: Spans | None = None
    # label indices of ``KVVersions`` by position, while the KV is on the host, waiting for room
    kv_backup: torch.Tensor | None = None
    # its KV is too old for other requests, or it moved with its KV to another adapter
    is_fenced_off: bool = False
    # before that, SGLang itself kept the request out of the prefix cache
    was_kept_out: bool = False
    # its ``extra_key`` has no mark but ours (``kv_ages.py``)
    has_own_key: bool = False
    # no older weights made its KV (``kv_ages.py``)
    kv_epoch: int = 0
    # retracted because its KV was too old, and not prefilled whole since
    is_refreshing: bool = False
    # number of the only weights that may make its tokens and its KV (``LiveWeights.weights``)
    weights: int | None = None
    _parts: dict[type, object] = field(default_factory=dict)

    def part(self, kind: type[P]) -> P:
        """Return an extension's own record, of the class ``kind``, made at the first call."""
        found = self._parts.get(kind)
        if found is None:
            found = self._parts[kind] = kind()
        assert isinstance(found, kind)
        return found


def record_of(req: Req) -> RequestRecord:
    """Return the record of ``req``, made at the first call: SGLang makes ``Req`` in many places."""
    record: RequestRecord | None = getattr(req, "inflight", None)
    if record is None:
        record = cast("_AdoptedReq", req).inflight = RequestRecord()
    return record

"""The step boundary: the only place in the event loop where weights and pauses change.

The loop takes in messages between two steps. Under overlap scheduling the last batch is
then launched, but its result is still queued: its tokens are not yet written to their
requests, and on CUDA its kernels may still run.

This module hooks ``Scheduler.abort_request``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, retract_all
from sglang.srt.managers.schedule_batch import ScheduleBatch as MicroBatch
from sglang.srt.managers.scheduler import _make_abort_req
from sglang.srt.mem_cache.common import discard_kv_cache_backup, release_kv_cache

from sglang_inflight.hooking import BEFORE, SCHEDULER, hook
from sglang_inflight.metrics import Metrics
from sglang_inflight.scheduler.beams import begin_beams_anew
from sglang_inflight.scheduler.by_version import paused_as_it_was, send_abort_output
from sglang_inflight.scheduler.host_tier import finish_copies
from sglang_inflight.scheduler.requests import Requests, record_of
from sglang_inflight.sglang_types import get_disagg, get_parallel

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req

    from sglang_inflight.sglang_types import Scheduler


# most requests ended between two steps: some 20 µs each
AT_ONCE = 64


class Boundary:
    """Operations of pauses and commits on a scheduler between two steps.

    Only the scheduler's thread calls this, from a message's handler. ``ingest_requests`` runs
    handlers at a boundary and nowhere else.
    """

    def __init__(self, scheduler: Scheduler, metrics: Metrics) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self.requests = Requests(scheduler)
        # queued requests with a reason to end, in the order in which they end
        self._ending: dict[Req, None] = {}
        # see ``refreshing``
        self._refreshing: dict[Req, None] = {}

    def drain(self) -> None:
        """Finish the last forward and process its result, as the loop itself would.

        Afterwards every sampled token is in its request, and no kernel of a forward
        runs. Patch 0001 keeps the loop from waiting for that result again.
        """
        scheduler = self._scheduler
        self._finish_chunk()
        while self.requests.result_queue:
            batch, result = scheduler.result_queue.popleft()
            scheduler.process_batch_result(batch, result)
        # A result is ready when its tokens are copied. A draft model may still run after that,
        # so wait for the stream. Without overlap scheduling forwards run on the loop's own
        # stream, the current one here.
        if scheduler.device != "cpu":
            scheduler.forward_stream.synchronize()
            scheduler.device_module.current_stream().synchronize()

    def prepare_to_hold(self) -> None:
        """Drain, and tell SGLang's watchdog to expect no step.

        The watchdog ends a server whose current batch makes no step, unless there is no batch.
        """
        self.drain()
        self.expect_no_step()

    def expect_no_step(self) -> None:
        """Keep the watchdog quiet while this handler lasts longer than a step may."""
        self._scheduler.cur_batch_for_debug = None

    def is_fully_idle(self, *, ignore_waiting: bool = False) -> bool:
        """Return SGLang's ``is_fully_idle``, after processing the result in flight."""
        self.drain()
        self.forget_finished()
        return self._scheduler.is_fully_idle(ignore_waiting=ignore_waiting)

    def forget_finished(self) -> None:
        """Empty the batches whose requests have all finished: SGLang counts them as busy.

        SGLang empties them when it schedules the next step, and a frozen loop schedules none.
        Their KV was released with their last result.
        """
        scheduler = self._scheduler
        batches = [scheduler.running_batch, scheduler.last_batch, *self.requests.parked_batches]
        if get_parallel().pp_size > 1:
            batches += [*scheduler.running_mbs, *scheduler.last_mbs]
        for batch in batches:
            if batch is not None and all(req.finished() for req in batch.reqs):
                batch.filter_batch()
                batch.batch_is_full = False

    def _finish_chunk(self) -> None:
        """Process the chunk of the last batch, as a prefill server does before its result.

        The result sends the chunk's KV, as far as it is cached by then. The flag keeps SGLang
        from processing the chunk a second time.
        """
        scheduler = self._scheduler
        last = scheduler.last_batch
        if not self.requests.result_queue or last is None or last.prefill_chunk_processed:
            return
        if scheduler.disaggregation_mode is DisaggregationMode.PREFILL:
            scheduler.process_prefill_chunk(last_batch=last, running_batch=scheduler.running_batch)
            last.prefill_chunk_processed = True

    def _queue_for_the_other_server(self) -> Iterator[list[Any]]:
        """Yield the queue of requests that wait for the other server, if there is one."""
        scheduler = self._scheduler
        if scheduler.disaggregation_mode is DisaggregationMode.PREFILL:
            yield scheduler.disagg_prefill_bootstrap_queue.queue
        elif scheduler.disaggregation_mode is DisaggregationMode.DECODE:
            yield scheduler.disagg_decode_prealloc_queue.queue

    def sessions(self) -> Collection[str]:
        """Return the ids of the streaming sessions that keep KV."""
        names: Collection[str] = self._scheduler.tree_cache.session_records()
        return names

    def free_sessions(self, names: Container[str]) -> list[Req]:
        """Release the KV that idle streaming sessions of these ids keep for their next request.

        Return the requests that use their session's KV. A waiting request is not one of them:
        it may have borrowed the KV already, but has computed nothing on it.
        """
        cache = self._scheduler.tree_cache
        records = {name: kv for name, kv in cache.session_records().items() if name in names}
        if not records:
            return []
        waiting = self.requests.without_kv()
        users = {id(req.kv): req for req in self.requests.live().difference(waiting)}
        idle = {id(kv) for kv in records.values()} - users.keys()
        for req in waiting:
            if id(req.kv) in idle:
                req.detach_kv()
        for session_id, kv in records.items():
            if id(kv) in idle:
                cache.release_session(session_id)
        return [users[id(kv)] for kv in records.values() if id(kv) in users]

    @hook(f"{SCHEDULER}.abort_request", BEFORE, via="inflight.boundary")
    def abort_waiting(self, recv_req: AbortReq) -> None:
        """Abort queued requests that SGLang's abort misses, or ends only with the next batch.

        Requests without a compiled grammar move to the waiting queue, where SGLang's abort ends
        them at once. A decode server's waiting queue holds requests with KV only, so there they
        are ended here. So are its ``held_rebootstrap_reqs``.
        """
        scheduler = self._scheduler
        grammars = scheduler.grammar_manager
        without_grammar = [req for req in grammars.grammar_queue if _is_meant(req, recv_req)]
        grammars.grammar_queue = [r for r in grammars.grammar_queue if not _is_meant(r, recv_req)]
        for req in without_grammar:
            compiling: Any = req.grammar
            if compiling is not None:
                compiling.cancel()
        if scheduler.disaggregation_mode is not DisaggregationMode.DECODE:
            scheduler.waiting_queue += without_grammar
            return
        for req in without_grammar:
            scheduler._release_aborted_request(req)
        prealloc = scheduler.disagg_decode_prealloc_queue
        held = [req for req in prealloc.held_rebootstrap_reqs if _is_meant(req, recv_req)]
        prealloc.held_rebootstrap_reqs = [
            req for req in prealloc.held_rebootstrap_reqs if not _is_meant(req, recv_req)
        ]
        for req in held:
            # the last token, kept apart for the prefill that is not going to happen
            if req.pd_rebootstrap_forced_output_id is not None:
                req.output_ids.append(req.pd_rebootstrap_forced_output_id)
                req.pd_rebootstrap_forced_output_id = None
        for req in (*without_grammar, *held):
            send_abort_output(scheduler, _make_abort_req(req, recv_req.finished_reason), req)

    def retract(self) -> int:
        """Send running requests back to the waiting queue and free their KV.

        Leave the loop running or paused, as before. Return the number of retracted requests.
        """
        scheduler = self._scheduler
        self.drain()
        running = self.requests.running()
        self._count(running)
        begin_beams_anew(scheduler, running)
        if get_parallel().pp_size > 1:
            self._retract_microbatches()
        else:
            self._retract_backed_up()
            with paused_as_it_was(scheduler):
                scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
            self._retract_parked()
        return len(running)

    def _retract_parked(self) -> None:
        """Retract what SGLang's retraction does not know; called after it."""
        parked = self.requests.parked_batches
        if parked:
            reqs = dict.fromkeys(req for batch in parked for req in batch.reqs)
            running = self.requests.running()
            self._requeue([req for req in reqs if req in running])

    def retract_some(self, reqs: Iterable[Req]) -> list[Req]:
        """Send the running ones of ``reqs`` back to the waiting queue, and free their KV.

        Return these.
        """
        self.drain()
        running = self.requests.running()
        held = [req for req in reqs if req in running]
        self._count(held)
        begin_beams_anew(self._scheduler, held)
        self._requeue(held)
        return held

    def refresh(self, reqs: Sequence[Req]) -> list[Req]:
        """Have the running ones of ``reqs`` recompute their KV before other requests begin.

        Return these, in the order of ``reqs``.
        """
        held = self.retract_some(reqs)
        self.put_first(held)
        return held

    def refreshing(self) -> list[Req]:
        """Return the requests that still recompute too old KV, in the order of their retraction."""
        if not self._refreshing:
            return []
        # the others are prefilled whole, or have left the queue: an aborted one may be unfinished
        there = {*self._scheduler.waiting_queue, self._scheduler.chunked_req}
        for req in list(self._refreshing):
            record = record_of(req)
            record.is_refreshing &= req in there
            if not record.is_refreshing:
                del self._refreshing[req]
        return list(self._refreshing)

    def put_first(self, retracted: Collection[Req]) -> None:
        """Put retracted requests in front of the queue, and mark that they recompute KV.

        They keep their order in the queue, which is the same on all ranks.
        """
        scheduler, theirs = self._scheduler, set(retracted)
        first = [req for req in scheduler.waiting_queue if req in theirs]
        for req in first:
            record_of(req).is_refreshing = True
            self._refreshing[req] = None
        others = (req for req in scheduler.waiting_queue if req not in theirs)
        scheduler.waiting_queue = [*first, *others]

    def _count(self, reqs: Collection[Req]) -> None:
        """Count requests that are about to be retracted."""
        self._metrics.retracted.inc(len(reqs))
        self._metrics.recomputed.inc(sum(req.kv.kv_committed_len for req in reqs))

    def _requeue(self, held: list[Req]) -> None:
        """Retract running requests, parked ones too. Every result is processed."""
        scheduler = self._scheduler
        self._take_kv_from(held)
        current = [scheduler.running_batch, scheduler.last_batch]
        for batch in (*current, *self.requests.parked_batches):
            if batch is not None:
                batch.filter_batch(reqs_to_exclude=held)
                batch.batch_is_full = False
        if scheduler.chunked_req in held:
            scheduler.chunked_req = None
        for req in held:
            scheduler._add_request_to_queue(req)

    def end(self, reasons: Mapping[Req, FINISH_ABORT]) -> None:
        """End requests with their tokens: queued ones now, running ones at their next result.

        A call ends ``AT_ONCE`` queued requests. ``end_some`` ends the others, and no batch takes
        them. A pipeline ends all, because its stages make other passes between two steps.

        SGLang's abort ends queued requests, too. But it would look through every queue for each of
        them, end every request with an id that begins with one of theirs, and leave a request
        without a compiled grammar to a batch that may never come.
        """
        if not reasons:
            return
        for req, reason in reasons.items():
            req.to_finish = reason
        queues = (self._scheduler.waiting_queue, self._scheduler.grammar_manager.grammar_queue)
        self._ending |= {req: None for queue in queues for req in queue if req in reasons}
        self.end_some(at_once=None if get_parallel().pp_size > 1 else AT_ONCE)

    def is_ending(self, req: Req) -> bool:
        """Return whether a queued request is about to end, and no batch may take it."""
        return req in self._ending

    @property
    def are_ending(self) -> bool:
        return bool(self._ending)

    def end_some(self, *, at_once: int | None = AT_ONCE) -> None:
        """End some of the queued requests that ``end`` has left; all with ``at_once`` None.

        Each queue is looked through once, and the outputs go out together. An abort may have taken
        a request from its queue meanwhile. The ranks of a replica call this in the same passes.
        """
        if not self._ending:
            return
        some = dict.fromkeys(itertools.islice(self._ending, at_once))
        for req in some:
            del self._ending[req]
        ended = self._take_queued(some)
        for req in ended:
            req.update_finish_state()
            self._release_queued(req)
            req.time_stats.set_completion_time()
        if ended:
            with_logprobs = any(req.return_logprob for req in ended)
            self._scheduler.output_streamer.stream_output(ended, with_logprobs)

    def _take_queued(self, reqs: Container[Req]) -> list[Req]:
        """Remove those of ``reqs`` from the queues that wait there, and return these."""
        scheduler, grammars = self._scheduler, self._scheduler.grammar_manager
        without_grammar = [req for req in grammars.grammar_queue if req in reqs]
        for req in without_grammar:
            compiling: Any = req.grammar
            if compiling is not None:
                compiling.cancel()
        if without_grammar:
            grammars.grammar_queue = [req for req in grammars.grammar_queue if req not in reqs]
        waiting = [req for req in scheduler.waiting_queue if req in reqs]
        if waiting:
            scheduler.waiting_queue = [req for req in scheduler.waiting_queue if req not in reqs]
        return waiting + without_grammar

    def _release_queued(self, req: Req) -> None:
        """Release what a request has that was taken from a queue, as SGLang's abort does.

        Such a request has KV on a decode server alone.
        """
        scheduler = self._scheduler
        scheduler._release_aborted_request(req)
        if req.beam_group is not None:
            scheduler.beam_coordinator.retire_group(req)
        if scheduler.disaggregation_mode is DisaggregationMode.DECODE:
            if req.kv.holds_kv or req.kv.retraction_backup is not None:
                self._release_kv(req)
        elif scheduler.disaggregation_mode is DisaggregationMode.PREFILL:
            scheduler.release_aborted_prefill_waiting_req(req)
        elif req.kv.holds_mamba:
            release_kv_cache(req, scheduler.tree_cache, checkpoint=False)

    def _release_kv(self, req: Req) -> None:
        scheduler = self._scheduler
        if get_disagg().disaggregation_decode_host_receive_threshold < 1:
            discard_kv_cache_backup(req, scheduler.tree_cache, "host_pool")
        if scheduler.hisparse_coordinator is not None:
            scheduler.hisparse_coordinator.request_finished(req)
        release_kv_cache(req, scheduler.tree_cache, checkpoint=True)

    def _retract_microbatches(self) -> None:
        """Retract the requests of all microbatches: SGLang's retraction knows one batch.

        No microbatch may be in flight. Every stage has the same microbatches, and queues their
        requests in the same order.
        """
        scheduler = self._scheduler
        batches = [*scheduler.running_mbs, *(b for b in scheduler.last_mbs if b is not None)]
        held = dict.fromkeys(req for batch in batches for req in batch.reqs)
        if scheduler.chunked_req is not None:
            held[scheduler.chunked_req] = None
        reqs = [req for req in held if not req.finished() and not req.is_retracted]
        self._take_kv_from(reqs)
        turn = self.requests.turn
        microbatches = range(len(scheduler.running_mbs))
        scheduler.mbs = [None for _ in microbatches]
        scheduler.last_mbs = [None for _ in microbatches]
        scheduler.running_mbs = [MicroBatch(reqs=[], batch_is_full=False) for _ in microbatches]
        scheduler.running_batch = scheduler.running_mbs[turn]
        scheduler.last_batch = scheduler.cur_batch_for_debug = None
        scheduler.chunked_req = None
        for req in reqs:
            scheduler._add_request_to_queue(req)

    def _retract_backed_up(self) -> None:
        """Retract the requests that HiSparse backs up, once they have left the last batch.

        SGLang's retraction looks for them in that batch only.
        """
        scheduler = self._scheduler
        in_batches = scheduler.collect_inflight_reqs()
        reqs = [req for req in self.requests.backed_up() if req not in in_batches]
        self._take_kv_from(reqs)
        for req in reqs:
            scheduler._add_request_to_queue(req)

    def _take_kv_from(self, reqs: list[Req]) -> None:
        scheduler = self._scheduler
        retract_all(
            reqs=reqs,
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=scheduler.hisparse_coordinator,
            offload_kv=False,
        )

    def flush(self, *, empty_cache: bool) -> None:
        """Forget every cached prefix. No request may hold KV: call ``retract`` before."""
        scheduler = self._scheduler
        finish_copies(scheduler.tree_cache)
        self.forget_finished()
        # SGLang refuses to flush while requests wait. They hold no KV, so hide them
        was_paused, scheduler._engine_paused = scheduler._engine_paused, True
        queues = [scheduler.grammar_manager.grammar_queue, *self._queue_for_the_other_server()]
        held = [list(queue) for queue in queues]
        for queue in queues:
            queue.clear()
        try:
            flushed = scheduler.flush_cache(empty_cache=empty_cache)
        finally:
            for queue, reqs in zip(queues, held, strict=True):
                queue.extend(reqs)
            scheduler._engine_paused = was_paused
        if not flushed:
            raise RuntimeError("the prefix cache could not be flushed: a request still holds KV")


def _is_meant(req: Req, request: AbortReq) -> bool:
    return request.abort_all or req.rid == request.rid

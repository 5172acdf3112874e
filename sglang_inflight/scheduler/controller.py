"""Our one object in each scheduler process, called by patches and hooks.

This module hooks the scheduler's choice of a batch, its launch, and its queue. It also hooks
the copies of KV between the device's and the host's tier.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
)
from sglang.srt.managers.schedule_batch import NextBatchPlan
from sglang.utils import TypeBasedDispatcher

from sglang_inflight import capabilities
from sglang_inflight.hooking import (
    AFTER,
    AROUND,
    BEFORE,
    PROCESSOR,
    SCHEDULER,
    TRANSFERS,
    hook,
    with_us,
)
from sglang_inflight.joints import HasParts, Joint
from sglang_inflight.messages import (
    CommitCall,
    ContinueCall,
    Described,
    Done,
    DropCall,
    GiveUpTransferCall,
    InflightCall,
    JoinGroupCall,
    LeaveGroupCall,
    MayRecomputeCall,
    OpenCall,
    PauseCall,
    RenameCall,
    RollbackCall,
    SealCall,
    StageCall,
    StatusCall,
    TimesOver,
)
from sglang_inflight.metrics import Metrics
from sglang_inflight.scheduler.answers import AnswerChannel, find_reply_transport
from sglang_inflight.scheduler.boundary import AT_ONCE, Boundary
from sglang_inflight.scheduler.collectives import is_true_on_any_rank
from sglang_inflight.scheduler.hold import Hold
from sglang_inflight.scheduler.host_tier import transfers_of_kv
from sglang_inflight.scheduler.isolation import Containment
from sglang_inflight.scheduler.pause.machine import PauseState
from sglang_inflight.scheduler.pause.pause import Pause
from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.scheduler.retraction.prefilled_again import look_for_embeddings
from sglang_inflight.scheduler.update.assembly import make_staging
from sglang_inflight.scheduler.update.commit import CommitAnswers, Commits
from sglang_inflight.scheduler.update.hollow import HollowWeights
from sglang_inflight.scheduler.update.layout import name_layout
from sglang_inflight.scheduler.update.live_machine import Previous
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.rate import switch_often
from sglang_inflight.scheduler.versions.kv_ages import KVAges
from sglang_inflight.scheduler.versions.kv_versions import KVVersions
from sglang_inflight.scheduler.versions.token_versions import AdapterVersions, Versions
from sglang_inflight.settings import Settings
from sglang_inflight.sglang_types import get_memory, get_model, get_parallel
from sglang_inflight.vocabulary.answers import MemoryStatus

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.l2_transfer import L2Transfer
    from sglang.srt.server_args import PortArgs

    from sglang_inflight.scheduler.update.reservation import ReservingScheduler
    from sglang_inflight.vocabulary.answers import Role

# roles by SGLang's mode of disaggregation
_ROLES: dict[str, Role] = {"null": "both", "prefill": "prefill", "decode": "decode"}

Handler = Callable[[Any], None]
MayRun = Callable[["Req"], bool]
ChooseBatch = Callable[[Callable[..., NextBatchPlan]], NextBatchPlan | None]
# makes an extension's object beside a new controller; hooks find it by ``Controller.part``
PARTS: Joint[Callable[[Controller], object]] = Joint("parts of a scheduler")

# an extension's handlers of its own calls
CALLS: Joint[Callable[[Controller], Mapping[type[InflightCall[Any]], Handler]]] = Joint("calls")
# prepares a request that enters the queue, new or retracted
ENTRIES: Joint[Callable[[Controller, Req], None]] = Joint("queue entry")
# returns whether a prepared request may enter the queue; answers it otherwise
ADMISSIONS: Joint[Callable[[Controller, Req], bool]] = Joint("admission")
# The functions of the next four joints are called once, and return a function for every step.
# it runs at the step boundary, after the messages were handled
BOUNDARIES: Joint[Callable[[Controller], Callable[[], None]]] = Joint("boundary")
# it returns which waiting requests the next batch may take; None for all
CHOICES: Joint[Callable[[Controller], Callable[[], MayRun | None]]] = Joint("choice of requests")
# it chooses a batch by SGLang's function, or returns None; a pipeline does not ask it
BATCHES: Joint[Callable[[Controller], ChooseBatch]] = Joint("choice of a batch")
# it returns the version that makes the next forward; None for the served one
FORWARDS: Joint[Callable[[Controller], Callable[[], Previous | None]]] = Joint("forward")
# follows a commit or a rollback: the new label is there, and older KV still is
COMMITS: Joint[Callable[[Controller], None]] = Joint("commit")
# returns which of the running requests with too old KV, the oldest first, recompute it at a commit
OVERDUE: Joint[Callable[[Controller, list[Req]], list[Req]]] = Joint("too old KV")
# follows a new name of the served weights, or another adapter of waiting requests
RELABELS: Joint[Callable[[Controller], None]] = Joint("relabel")
# completes the description of this rank
STATUSES: Joint[Callable[[Controller, Described], None]] = Joint("status")
# ends what reads the weights on another thread, for the reason given, before they are released
READERS: Joint[Callable[[Controller, str], None]] = Joint("readers of weights")
# follows a change of contents past a commit: hollow weights were filled, or other code wrote them
CONTENTS: Joint[Callable[[Controller], None]] = Joint("contents of weights")


class Controller(HasParts):
    """Owns pause, staging, commits and versions of one scheduler, and routes calls to them.

    Everything here runs on the scheduler's thread, except ``Jobs``. A handler cannot end the
    scheduler: its exception becomes the rank's answer.
    """

    def __init__(self, scheduler: ReservingScheduler, port_args: PortArgs) -> None:
        settings = Settings.from_environment()
        switch_often(settings.switch_interval_s)
        self.scheduler = scheduler
        self.answers = AnswerChannel(find_reply_transport(port_args.tokenizer_ipc_name))
        metrics = self.metrics = Metrics(scheduler.weight_updater.metrics_collector)
        boundary = self.boundary = Boundary(scheduler, metrics)
        self.pause = Pause(scheduler, boundary, self.answers, metrics)
        kv_versions = self.kv_versions = KVVersions(scheduler)
        self.versions = Versions(boundary.requests, kv_versions)
        self.ages = KVAges(boundary)
        self.adapter_versions = AdapterVersions()
        self.live = LiveWeights(scheduler)
        parts = self.staging_parts = make_staging(
            scheduler,
            boundary,
            self.live,
            self.answers,
            metrics,
            settings,
            capabilities.of(scheduler.server_args),
            is_busy=self._is_busy,
        )
        self.staging = parts.staging
        self.hold = Hold(scheduler, boundary, self.pause, self.live, self.staging)
        self.commits = Commits(
            boundary,
            self.staging,
            self.live,
            self.versions,
            self.ages,
            metrics,
            name_layout(parts.layout),
            on_swap=self._follow_commit,
            choose_due=self._choose_due,
        )
        self._commit_answers = CommitAnswers(self.answers, self.live, metrics)
        self.hollow = HollowWeights(
            scheduler,
            self.pause,
            self.staging,
            self.live,
            self.answers,
            on_change=self._follow_contents,
            require_update=settings.require_update,
        )
        look_for_embeddings(scheduler)
        self.make_parts(make(self) for make in PARTS)
        self._at_boundaries = [find(self) for find in BOUNDARIES]
        self._choices = [find(self) for find in CHOICES]
        self._batches = [find(self) for find in BATCHES]
        self._forwards = [find(self) for find in FORWARDS]
        handlers: dict[type[InflightCall[Any]], Handler] = {
            PauseCall: self.pause.ask,
            ContinueCall: self.pause.resume,
            OpenCall: self._open,
            StageCall: self.staging.stage,
            SealCall: self.staging.seal,
            DropCall: self._drop,
            MayRecomputeCall: self._may_recompute,
            CommitCall: self._commit,
            RenameCall: self._rename,
            RollbackCall: self._roll_back,
            JoinGroupCall: self.staging.join_group,
            LeaveGroupCall: self.staging.leave_group,
            GiveUpTransferCall: self.staging.give_up_transfer,
            StatusCall: self._describe,
        }
        for more in CALLS:
            handlers |= more(self)
        defer = self.hold.pipeline_drain.defer
        dispatched: dict[type, Callable[[Any], None]] = {}
        for call_type, handler in handlers.items():
            contained = self._contain(handler)
            is_deferred = call_type.at_boundary
            dispatched[call_type] = defer(contained, _drains_pipeline) if is_deferred else contained
        dispatched[TimesOver] = defer(self.pause.end_times)
        scheduler._request_dispatcher += TypeBasedDispatcher([*dispatched.items()])
        # a script on the socket may send SGLang's own pause messages: handle them as ours
        scheduler._request_dispatcher._mapping |= {
            PauseGenerationReqInput: defer(self._take_upstream_pause),
            ContinueGenerationReqInput: defer(self._take_upstream_continue),
        }
        containment = Containment(
            scheduler,
            boundary,
            self.hollow,
            self.answers,
            self.staging.can,
            stop_reading=self.stop_reading_weights,
        )
        containment.surround(scheduler._request_dispatcher)
        self._background = containment.background

    # ---- called by patches and hooks ----------------------------------------------

    def holds_the_loop(self) -> bool:
        """Return whether the loop must skip this step.

        Called at every step boundary, after the messages were handled.
        """
        self._background.send_finished_answers()
        for settle in self._at_boundaries:
            settle()
        # where no step is held up, all end before the loop sleeps. The ranks of a replica agree
        is_stepping = self.pause.state is PauseState.RUNNING and not self.hold.is_due
        is_held_up = is_stepping and self._has_running
        self.boundary.end_some(at_once=AT_ONCE if is_held_up else None)
        self._commit_answers.give_due(wait=self.hold.is_due)
        return self.hold.holds_step()

    def needs_a_boundary(self, request: object) -> bool:
        """Return whether ``request``, and every message behind it, must wait for a boundary.

        A prefill server's loop may take in messages while it waits for a result. Two forwards
        are then in flight, and the later one may not be sampled yet. The loop is not at a
        boundary there, and checks no lease.
        """
        # a call of ours says so itself; SGLang's own pauses are ours, whoever sends them
        is_sglangs = isinstance(request, PauseGenerationReqInput | ContinueGenerationReqInput)
        return is_sglangs or bool(getattr(request, "at_boundary", False))

    def holds_the_turn(self) -> bool:
        """Return whether a pipeline's turn must launch nothing.

        Called in each turn, after the messages were handled.
        """
        held = self.hold.pipeline_drain.run_if_drained() or self.holds_the_loop()
        self.hold.count_turn(held=held)
        return held

    @hook(f"{SCHEDULER}.get_next_batch_to_run", AROUND, via="inflight")
    def choose_batch(self, choose: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Choose a batch as an extension does, or SGLang; launch nothing in a held turn.

        A pipeline's loop calls only this method between messages and launch.
        """
        if get_parallel().pp_size == 1:
            for choose_by in self._batches:
                if (plan := choose_by(choose)) is not None:
                    return plan
            return choose(*args, **kwargs)
        scheduler = self.scheduler
        if self.holds_the_turn():
            return NextBatchPlan(batch_to_run=None, running_batch=scheduler.running_batch)
        # a deferred call may have retracted the batches that the loop passed in
        return choose(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)

    @hook(f"{SCHEDULER}.get_new_batch_prefill", AROUND, via="inflight")
    def admit(self, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``schedule``, and show it only the requests that may run now.

        ``schedule`` moves requests with a compiled grammar to the waiting queue, and chooses the
        requests to prefill. So both queues are filtered.
        """
        is_draining = self.pause.state is PauseState.DRAINING
        boundary = self.boundary
        choices = [may_run for choice in self._choices if (may_run := choice()) is not None]
        if not is_draining and not choices and not boundary.are_ending:
            return schedule(*args, **kwargs)

        def is_held(req: Req) -> bool:
            if boundary.is_ending(req) or not all(may_run(req) for may_run in choices):
                return True
            return is_draining and not self.pause.admits(req)

        scheduler, grammars = self.scheduler, self.scheduler.grammar_manager
        held = [req for req in scheduler.waiting_queue if is_held(req)]
        scheduler.waiting_queue = [req for req in scheduler.waiting_queue if not is_held(req)]
        without_grammar = [req for req in grammars.grammar_queue if is_held(req)]
        grammars.grammar_queue = [req for req in grammars.grammar_queue if not is_held(req)]
        try:
            return schedule(*args, **kwargs)
        finally:
            scheduler.waiting_queue = held + scheduler.waiting_queue
            grammars.grammar_queue = without_grammar + grammars.grammar_queue

    @hook(f"{SCHEDULER}._add_request_to_queue", AROUND, via="inflight")
    def enqueue(self, add: Callable[..., None], req: Req, *args: Any, **kwargs: Any) -> None:
        """Prepare a request, new or retracted, and queue it if it is admitted."""
        self.prepare(req)
        if all(admits(self, req) for admits in ADMISSIONS):
            add(req, *args, **kwargs)

    def prepare(self, req: Req) -> None:
        """Prepare a request that enters the queue, new or retracted."""
        record_of(req).is_refreshing = False
        for admit in ENTRIES:
            admit(self, req)
        # last, because the key names the weights that an extension may have found
        self.ages.admit(req)

    @hook(f"{SCHEDULER}.run_batch", AROUND, via="inflight")
    def launch(
        self, run: Callable[..., Any], batch: ScheduleBatch, *args: Any, **kwargs: Any
    ) -> Any:
        """Launch the forward of ``batch``, and record the version of the KV that it writes."""
        for find in self._forwards:
            if (previous := find()) is not None:
                self.kv_versions.record_launch(batch, previous.label)
                with self.live.previous_in_place(previous):
                    return run(batch, *args, **kwargs)
        self.kv_versions.record_launch(batch)
        return run(batch, *args, **kwargs)

    # before a controller is there, the KV is of the first weights and needs no record
    @hook(f"{TRANSFERS}.submit_device_to_host", BEFORE, via="inflight", when=with_us)
    def follow_to_host(self, transfers: list[L2Transfer], *args: Any, **kwargs: Any) -> None:
        """Copy the versions of KV slots to the host's tier, before SGLang copies the KV.

        ``transfers`` may include other pools than the KV's: other pools have no versions.
        """
        for transfer in transfers_of_kv(self.scheduler.tree_cache, transfers):
            self.kv_versions.follow_to_host(transfer.host_indices, transfer.device_indices)

    @hook(f"{TRANSFERS}.submit_host_to_device", BEFORE, via="inflight", when=with_us)
    def follow_from_host(self, transfers: list[L2Transfer], *args: Any, **kwargs: Any) -> None:
        """Copy the versions of KV slots back to the device, before SGLang copies the KV."""
        for transfer in transfers_of_kv(self.scheduler.tree_cache, transfers):
            self.kv_versions.follow_from_host(transfer.host_indices, transfer.device_indices)

    @hook(f"{PROCESSOR}._resolve_spec_v2_tokens", AFTER, via="req_to_token_pool.inflight")
    def record_taken(self, tokens: list[list[int]], result: object, batch: ScheduleBatch) -> None:
        """Record the KV version of ``tokens``, a list for each request of a speculative forward."""
        self.kv_versions.record_taken(batch.reqs, tokens, behind=self.versions.changes_behind)

    def _follow_commit(self) -> None:
        for follow in COMMITS:
            follow(self)

    def _choose_due(self, over: list[Req]) -> list[Req]:
        for choose in OVERDUE:
            over = choose(self, over)
        return over

    def follow_relabel(self) -> None:
        for follow in RELABELS:
            follow(self)

    # ---- handlers ------------------------------------------------------------------

    def _contain(self, handler: Callable[[Any], None]) -> Callable[[InflightCall[Any]], None]:
        @functools.wraps(handler)
        def contained(call: InflightCall[Any]) -> None:
            try:
                handler(call)
            except Exception as error:
                self.answers.fail(call, error)

        return contained

    def _take_upstream_pause(self, request: PauseGenerationReqInput) -> None:
        self.pause.ask(PauseCall(mode=request.mode, pause_id="upstream"))

    def _take_upstream_continue(self, request: ContinueGenerationReqInput) -> None:
        self.pause.resume(ContinueCall(torch_empty_cache=request.torch_empty_cache))

    def stop_reading_weights(self, why: str) -> None:
        """Return when no other thread reads the weights."""
        for end in READERS:
            end(self, why)

    def _follow_contents(self) -> None:
        for follow in CONTENTS:
            follow(self)

    def _open(self, call: OpenCall) -> None:
        self.hollow.require_weights("a weight update")
        self.staging.open(call, current_version=self.versions.current)

    def _drop(self, call: DropCall) -> None:
        written = self.staging.may_have_written_by_handles(call.update_id)
        self.staging.drop(call)
        if (
            get_model().remote_instance_weight_loader_start_seed_via_transfer_engine
            # ranks may have received different numbers of tensors before the message
            and is_true_on_any_rank(written)
        ):
            self.hollow.overwritten("a dropped session's client may have written them over RDMA")

    def _may_recompute(self, call: MayRecomputeCall) -> None:
        self.commits.require_recomputable()
        self.answers.succeed(call, Done())

    def _commit(self, call: CommitCall) -> None:
        was_hollow = self.live.hollow is not None
        try:
            committed = self.commits.commit(call)
        finally:
            if was_hollow:
                self.hollow.after_filling()
        committed.hollow = self.live.hollow
        self._commit_answers.give(call, committed)

    def _roll_back(self, call: RollbackCall) -> None:
        self.hollow.require_weights("a rollback")
        self._commit_answers.give(call, self.commits.roll_back(call))

    def _rename(self, call: RenameCall) -> None:
        self.versions.rename(call.weight_version)
        self.follow_relabel()
        self._describe(call)

    def _describe(self, call: StatusCall | RenameCall) -> None:
        why = self.live.hollow
        described = Described(
            capabilities=capabilities.with_store(self.staging.can, get_memory()),
            role=_ROLES[self.scheduler.disaggregation_mode.value],
            pause=self.pause.describe(),
            weights=self.commits.describe(),
            staging=self.staging.describe(),
            memory=MemoryStatus(weights="present" if why is None else "hollow", hollow=why),
        )
        for complete in STATUSES:
            complete(self, described)
        self.answers.succeed(call, described)

    def _is_busy(self) -> bool:
        return not (self.hold.is_frozen or self.staging.holds_the_loop) and self._has_running

    @property
    def _has_running(self) -> bool:
        batches = (self.scheduler.running_batch, *self.boundary.requests.parked_batches)
        return any(not batch.is_empty() for batch in batches)


def _drains_pipeline(call: InflightCall[Any]) -> bool:
    return call.drains_pipeline()

"""Memory that a rank gives back while its requests wait, and takes again.

It is done in two phases, so that all ranks do it or none: what can be refused, or can fail, is
done before the vote, which the front end hears (``frontend/memory.py``). From its vote on a rank
makes no step. Nothing of ours, nor a handler of SGLang's that is let through, touches what is
away: on CUDA that would end the process.

    before the vote   no update is open, no request needs what goes; what is to be kept is copied
    the release       the shadow goes, the cache is flushed, the memory saver takes the pages
    the return        the pages come, what was kept is put back, generation goes on

Weights of which nothing was kept come back hollow. No request is served until updates have
written each element of them, and these write in place: there is nothing to be swapped out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from sglang_inflight.errors import BadSetting, Conflict, Dropped, HalfDone
from sglang_inflight.messages import (
    CancelReleaseCall,
    Done,
    Moved,
    PrepareReleaseCall,
    PrepareResumeCall,
    ReleaseCall,
    ResumeCall,
)
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.collectives import is_true_of_any
from sglang_inflight.scheduler.memory.copies import Copy, copy_of
from sglang_inflight.scheduler.memory.machine import (
    KINDS,
    KV_CACHE,
    PRESENT,
    WEIGHTS,
    Event,
    Memory,
    Where,
    move,
    released,
)
from sglang_inflight.scheduler.memory.regions import MemoryRegions, bytes_in_use, trim
from sglang_inflight.scheduler.pause.machine import PauseState
from sglang_inflight.scheduler.pause.pause import Pause
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.staging import Staging
from sglang_inflight.scheduler.update.staging_state import StagingState
from sglang_inflight.sglang_types.runtime_context import get_exec, get_model, get_parallel
from sglang_inflight.status import MemoryStatus
from sglang_inflight.unsupported import why_no_retraction

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.scheduler import Scheduler

logger = logging.getLogger(__name__)

# what the shadow had is told beside the kinds of memory
SHADOW = "shadow"


class _Prepared:
    """A release that this rank has voted for. The staging thread writes ``copy``, and the
    scheduler's thread ``given_up``, once each."""

    def __init__(self, events: dict[str, Event], after: Memory) -> None:
        self.events = events
        self.after = after
        self.copy: Copy | None = None
        self.given_up = False

    def check(self) -> None:
        if self.given_up:
            raise Dropped("the release was given up")


BRINGS_BACK = "resume_memory_occupation brings it back"


class MemoryRelease:
    """The memory of one rank. Only the scheduler's thread calls it."""

    def __init__(
        self,
        scheduler: Scheduler,
        boundary: Boundary,
        pause: Pause,
        staging: Staging,
        live: LiveWeights,
        answers: AnswerChannel,
        *,
        require_update: bool,
    ) -> None:
        """``require_update``: what the weights were loaded with is not to be served."""
        self._scheduler = scheduler
        self._boundary = boundary
        self._pause = pause
        self._staging = staging
        self._live = live
        self._answers = answers
        self._saver = scheduler.weight_updater.memory_saver_adapter
        self._occupants = MemoryRegions(scheduler)
        self._device = self._occupants.device
        self._memory: Memory = PRESENT
        self._prepared: _Prepared | None = None
        self._copy: Copy | None = None
        # by kind of memory, what its return takes
        self._bytes: dict[str, int] = {}
        # whether generation is held back while weights are hollow
        self._until_filled = False
        # the reference platform's; torch_memory_saver has noted what was allocated where, and
        # copies the weights itself where it was told to when they were allocated
        look_in = getattr(self._saver, "look_in", None)
        if look_in is not None:
            look_in(self._occupants.of)
        self._saver_copies = self._is_backup_wanted and look_in is None
        if require_update:
            if (why := staging.refusal or staging.why_not_staged) is not None:
                raise BadSetting(f"SGLANG_INFLIGHT_REQUIRE_UPDATE: {why}")
            self._memory = {**PRESENT, WEIGHTS: Where.HOLLOW}
            live.become_hollow("none were sent since the start (SGLANG_INFLIGHT_REQUIRE_UPDATE)")

    # ---- a release -------------------------------------------------------------------

    def may_release(self, call: PrepareReleaseCall) -> None:
        """Vote. All ranks of a replica hold still from here on, or none does."""
        events = self._events_of(call)
        after = move(self._memory, events)
        refusal = self._why_not(call, after)
        if is_true_of_any(refusal is not None) or after is None:
            raise Conflict(refusal or "memory is not released: another rank refuses it")
        self._pause.hold_for_memory(f"{_list(call.tags)} are being released. {BRINGS_BACK}")
        # a commit since the loop froze may still be swapping, on a stream that copying is not on
        self._boundary.drain()
        prepared = self._prepared = _Prepared(events, after)

        def copy() -> Done:
            prepared.copy = self.copy_for(prepared)
            return Done()

        # after all jobs of updates that were dropped: their shadow is the scheduler's then
        self._staging.when_idle(call, copy)

    def release(self, call: ReleaseCall) -> None:
        """Raises ``HalfDone`` where it fails on a rank; all of its replica take again then what
        they gave, because one alone would make a step that the others do not make."""
        prepared = self._take_prepared()
        started = time.perf_counter()
        moved: dict[str, int] = {}
        failure: Exception | None = None
        try:
            self._give_back(prepared, moved)
        except Exception as error:
            failure = error
        if is_true_of_any(failure is not None):
            self._return([kind for kind in prepared.events if kind in released(self._memory)], {})
            self._settle()
            raise HalfDone(
                "memory was released, on some ranks, and taken again, but for the shadow's: "
                f"{failure or 'another rank failed'}"
            )
        self._settle()
        self._answer(call, moved, started)

    def _give_back(self, prepared: _Prepared, moved: dict[str, int]) -> None:
        before = bytes_in_use(self._device)
        self._staging.forget_shadows()
        trim(self._device)
        moved[SHADOW] = max(0, before - bytes_in_use(self._device))
        if KV_CACHE in prepared.events:
            self._boundary.flush(empty_cache=False)
        self._copy = prepared.copy or self._copy
        for kind in reversed(KINDS):
            if kind not in prepared.events:
                continue
            before = bytes_in_use(self._device)
            self._saver.pause(kind)
            self._scheduler.weight_updater.offload_tags.add(kind)
            self._memory = {**self._memory, kind: prepared.after[kind]}
            self._synchronize()
            self._bytes[kind] = moved[kind] = max(0, before - bytes_in_use(self._device))
        if self._memory[WEIGHTS] is Where.LOST:
            self._live.digest = None

    def stay(self, call: CancelReleaseCall) -> None:
        """It is no error if this rank refused."""
        if self._prepared is not None:
            self._take_prepared().given_up = True
            self._settle()
        # answered when the staging thread has let go of the weights
        self._staging.when_idle(call, Done)

    def _take_prepared(self) -> _Prepared:
        if self._prepared is None:
            raise Conflict("no release was voted for")
        prepared, self._prepared = self._prepared, None
        return prepared

    def _events_of(self, call: PrepareReleaseCall) -> dict[str, Event]:
        events = dict.fromkeys(call.tags, Event.KEEP)
        # where nothing goes, or --enable-weights-cpu-backup is set, nothing can be lost; and what
        # no update can bring must not be
        can_be_lost = self._saver.enabled and not self._is_backup_wanted and self._why_kept is None
        if WEIGHTS in events and can_be_lost and call.keep_weights != "host":
            events[WEIGHTS] = Event.DISCARD
        return events

    @property
    def _why_kept(self) -> str | None:
        """Why weights are kept whatever the caller says, or None where they may be lost."""
        if get_parallel().pp_size > 1:
            # one that is whole again would make a step, and wait for one that is not
            return "because the stages of a pipeline may be whole again in different turns"
        if (why := self._staging.refusal or self._staging.why_not_staged) is not None:
            return f"which cannot be sent: {why}"
        return None

    @property
    def _is_backup_wanted(self) -> bool:
        return get_exec().features.enable_weights_cpu_backup

    def _why_not(self, call: PrepareReleaseCall, after: Memory | None) -> str | None:
        """Why memory cannot be released now, or None where it can."""
        tags = call.tags
        if call.keep_weights == "discard" and (why := self._why_kept) is not None:
            return f"weights are not discarded, {why}"
        if self._prepared is not None:
            return "memory is being released already"
        if after is None:
            return f"memory is released already: {_list(released(self._memory, tags))}"
        if self._staging.state is not StagingState.EMPTY:
            return "memory cannot be released: a weight update is open. End or abort it first"
        if WEIGHTS in tags and get_model().weight_cache_mode != "off":
            return "weights are shared with other engines (--weight-cache-mode): they stay"
        return self._who_needs(tags)

    def _who_needs(self, tags: list[str]) -> str | None:
        # after it, because a result that is processed may end requests
        is_idle = self._boundary.is_fully_idle()
        running = len(self._boundary.running_requests())
        waiting = len(self._boundary.waiting_requests())
        match self._pause.state:
            case PauseState.FROZEN:
                # they hold KV, and nothing reads weights before the next step
                is_needed = running > 0 and set(tags) != {WEIGHTS}
            case PauseState.RUNNING:
                is_needed = not is_idle
            case PauseState.DRAINING:
                return "memory cannot be released: a pause still waits for requests to end"
        if not is_needed:
            return None
        return (
            f"memory cannot be released: {running} requests run and {waiting} wait. Let them "
            'end, or pause with mode "retract" or "abort"; in a pause of mode "in_place" '
            "weights may go, and nothing else"
        )

    def copy_for(self, prepared: _Prepared) -> Copy | None:
        """On the staging thread. Nothing writes the weights meanwhile: no update is open."""
        if WEIGHTS not in prepared.events or not self._saver.enabled or self._saver_copies:
            return None
        if prepared.after[WEIGHTS] is Where.AWAY:
            kept = self._occupants.all_of_models()
        else:
            kept = self._occupants.tensors_not_in_checkpoints()
        return copy_of(kept, self._device, prepared.check)

    # ---- the return ------------------------------------------------------------------

    def may_resume(self, call: PrepareResumeCall) -> None:
        if self._after_return(call.tags) is None:
            held = [tag for tag in call.tags if tag not in released(self._memory)]
            raise Conflict(f"memory was not released: {_list(held)}")
        if self._device.type != "cpu" and self._saver.enabled:
            free, _ = torch.get_device_module(self._device).mem_get_info(self._device)
            needed = sum(self._bytes.get(tag, 0) for tag in call.tags)
            if free < needed:
                raise Conflict(
                    f"memory cannot be taken again: {_list(call.tags)} need {needed >> 20} MiB, "
                    f"and {free >> 20} MiB are free on {self._device}"
                )
        self._answers.succeed(call, Done())

    def resume(self, call: ResumeCall) -> None:
        """Raises ``HalfDone`` where it fails; all ranks of the replica stay asleep then."""
        started = time.perf_counter()
        if self._after_return(call.tags) is None:
            raise Conflict(f"memory was not released: {_list(call.tags)}")
        moved: dict[str, int] = {}
        failure: Exception | None = None
        try:
            self._return(call.tags, moved)
        except Exception as error:
            failure = error
        if is_true_of_any(failure is not None):
            raise HalfDone(f"memory did not come back: {failure or 'another rank failed'}")
        self._until_filled = call.until_filled
        self._settle()
        self._answer(call, moved, started)

    def _after_return(self, tags: list[str]) -> Memory | None:
        return move(self._memory, dict.fromkeys(tags, Event.RESUME))

    def _return(self, tags: list[str], moved: dict[str, int]) -> None:
        for kind in KINDS:
            if kind not in tags:
                continue
            before = bytes_in_use(self._device)
            self._saver.resume(kind)
            if kind == WEIGHTS and self._copy is not None:
                self._copy.put_back()
                self._copy = None
                trim(self._device)
            self._synchronize()
            self._scheduler.weight_updater.offload_tags.discard(kind)
            after = self._after_return([kind])
            assert after is not None
            self._memory = after
            if after[WEIGHTS] is Where.HOLLOW and kind == WEIGHTS:
                self._live.become_hollow("they were released and no copy was kept")
            moved[kind] = max(0, bytes_in_use(self._device) - before)

    def after_filling(self) -> None:
        """An update went into hollow weights, and may have made them whole: on all ranks of the
        replica, because one alone would make a step that the others do not make."""
        if is_true_of_any(self._live.hollow is not None):
            self._live.hollow = self._live.hollow or "another rank misses some of them"
            return
        after = move(self._memory, {WEIGHTS: Event.FILLED})
        assert after is not None
        self._memory = after
        was_frozen = self._pause.state is PauseState.FROZEN
        self._settle()
        if was_frozen and self._pause.state is PauseState.RUNNING:
            self._answers.tell_that_generation_continues()

    # ---- another writer ----------------------------------------------------------------

    def why_not_overwritten(self) -> str | None:
        """Why the weights must not be lost now, or None where updates can bring them back."""
        if (why := self._staging.refusal) is not None:
            return f"no update could bring the weights back: {why}"
        if (why := self._why_not_held) is not None:
            return f"this server cannot hold requests back until the weights are whole: {why}"
        if self._staging.state is not StagingState.EMPTY:
            return "a weight update is open. End or abort it first"
        return None

    @property
    def _why_not_held(self) -> str | None:
        if get_parallel().pp_size > 1:
            return "the stages of a pipeline may be whole again in different turns"
        return why_no_retraction()

    def copy_beside_updates(self) -> Copy:
        """Copy the tensors that no update brings, to put them back after another writer."""
        return copy_of(self._occupants.tensors_not_in_checkpoints(), self._device, _never_give_up)

    def overwritten(self, why: str) -> None:
        """Something else than an update has written the live weights, on all ranks of the replica.

        Generation is refused until updates have written each element; where that cannot be
        counted (``InPlaceModel``), until one whole update has. A server that cannot hold
        requests back serves them on. No way leads back: a rollback would be to what is live now.
        """
        logger.warning("Nobody knows what is in the weights: %s.", why)
        self._live.lose_name()
        if self._why_not_held is not None:
            return
        if self._staging.why_not_staged is None:
            after = move(self._memory, {WEIGHTS: Event.OVERWRITE})
            assert after is not None
            self._memory = after
            # requests that wait already for weights that are to come go on waiting
            self._until_filled = self._until_filled and self._live.hollow is not None
            self._live.become_hollow(why)
        else:
            roles = [role for role, _ in self._scheduler.weight_updater._select_runners("all")]
            self._live.become_dirty(why, roles)
        self._settle()
        # ``/ready`` depends on it
        self._answers.tell_that_generation_continues()

    def brought_back_by_sglang(self, tags: list[str] | None) -> None:
        """Memory came back by SGLang's own call, on a server that has no pauses.

        Without a backup nobody knows what is in the weights, and SGLang serves them as they are.
        """
        if WEIGHTS in (tags or KINDS) and not self._saver_copies:
            self._live.lose_name()

    # ---- what others ask ---------------------------------------------------------------

    def require_weights(self, who: str) -> None:
        """Raises ``Conflict`` where the weights' memory is not here, for ``who`` would touch it."""
        if WEIGHTS in self._scheduler.weight_updater.offload_tags:
            raise Conflict(f"{who} needs the weights, whose memory is released: {BRINGS_BACK}")

    def describe(self) -> MemoryStatus:
        where = {kind: self._memory[kind].value for kind in KINDS}
        return MemoryStatus(**where, hollow=self._live.hollow)

    def _settle(self) -> None:
        """Generation is held back for as long as something is missing, and no longer."""
        if away := released(self._memory):
            self._pause.hold_for_memory(f"{_list(away)} are released. {BRINGS_BACK}")
        elif self._live.hollow is not None and self._until_filled:
            self._pause.hold_for_memory(
                f"the weights are hollow, {self._live.hollow}. Updates that bring all of them let "
                "it go on"
            )
        else:
            self._pause.memory_is_back()

    def _answer(
        self, call: ReleaseCall | ResumeCall, moved: dict[str, int], started: float
    ) -> None:
        seconds = time.perf_counter() - started
        paused = self._pause.state is not PauseState.RUNNING
        hollow = self._live.hollow
        self._answers.succeed(
            call, Moved(bytes=moved, seconds=seconds, paused=paused, hollow=hollow)
        )

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize()


def _never_give_up() -> None:
    pass


def _list(kinds: Iterable[str]) -> str:
    return ", ".join(sorted(kinds))

"""Releases a rank's memory while its requests wait, and resumes it.

A release has two phases, so that all ranks release or none. Steps that can be refused or can fail
come before the rank's vote, its answer to the front end (``front_end.py``). After its vote a
rank makes no step. Neither our code nor an admitted handler of SGLang's touches released memory:
on CUDA that would end the process.

    before the vote   refuse if an update is open or a request needs the memory; copy kept weights
    release           drop the shadow, flush the cache, let the memory saver take the pages
    resume            map the pages, restore the copy, continue generation

Weights without a copy come back hollow. No request is served until updates have written each
element. These updates write in place, because there are no old weights to keep. Drafts are kept,
unless the caller asks to discard all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from sglang_inflight.extensions.memory.machine import (
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
from sglang_inflight.extensions.memory.messages import (
    CancelReleaseCall,
    Moved,
    PrepareReleaseCall,
    PrepareResumeCall,
    ReleaseCall,
    ResumeCall,
)
from sglang_inflight.messages import Described, Done, InflightCall
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.collectives import is_true_on_any_rank
from sglang_inflight.scheduler.controller import (
    CALLS,
    CONTENTS,
    PARTS,
    STATUSES,
    Controller,
    Handler,
)
from sglang_inflight.scheduler.pause.machine import PauseState
from sglang_inflight.scheduler.pause.pause import Pause
from sglang_inflight.scheduler.update.copies import Copy, copy_of
from sglang_inflight.scheduler.update.hollow import BRINGS_BACK
from sglang_inflight.scheduler.update.live_machine import Empty, Lose
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.regions import MemoryRegions, bytes_in_use, trim
from sglang_inflight.scheduler.update.staging import Staging, StagingState
from sglang_inflight.sglang_types import get_exec, get_model, get_parallel
from sglang_inflight.vocabulary.answers import MemoryStatus
from sglang_inflight.vocabulary.errors import Conflict, Dropped, HalfDone

if TYPE_CHECKING:
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    from sglang_inflight.sglang_types import Scheduler

# the weights of each draft, by role
Drafts = Mapping[str, Sequence[torch.Tensor]]

# key of the shadow's bytes in an answer, beside the kinds of memory
SHADOW = "shadow"


class _Prepared:
    """A release after this rank's vote.

    The staging thread writes ``copy``, and the scheduler's thread ``given_up``, once each.
    """

    def __init__(self, events: dict[str, Event], after: Memory, drafts: Drafts) -> None:
        """``drafts`` are kept even if the weights are discarded."""
        self.events = events
        self.drafts = drafts
        self.after = after
        self.copy: Copy | None = None
        self.given_up = False

    def check(self) -> None:
        if self.given_up:
            raise Dropped("the release was cancelled")


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
        stop_reading: Callable[[str], None],
    ) -> None:
        """``stop_reading`` returns when no other thread reads the weights."""
        self._stop_reading = stop_reading
        self._scheduler = scheduler
        self._boundary = boundary
        self._pause = pause
        self._staging = staging
        self._live = live
        self._answers = answers
        self._saver: TorchMemorySaverAdapter = scheduler.weight_updater.memory_saver_adapter
        self._occupants = MemoryRegions(scheduler)
        self._device = self._occupants.device
        self._memory: Memory = PRESENT
        self._prepared: _Prepared | None = None
        self._copy: Copy | None = None
        # roles of the drafts in a copy of discarded weights
        self._kept = frozenset[str]()
        # bytes to allocate at the resume, by kind of memory
        self._bytes: dict[str, int] = {}
        # whether generation is held back while weights are hollow
        self._until_filled = False
        # The reference platform's saver asks us for the regions. torch_memory_saver has recorded
        # each allocation, and copies the weights itself with --enable-weights-cpu-backup.
        look_in = getattr(self._saver, "look_in", None)
        if look_in is not None:
            look_in(self._occupants.of)
        self._saver_copies = self._is_backup_wanted and look_in is None

    # ---- a release -------------------------------------------------------------------

    def prepare_release(self, call: PrepareReleaseCall) -> None:
        """Vote. After this all ranks of a replica are frozen, or none is."""
        events = self._events_of(call)
        after = move(self._memory, events)
        refusal = self._why_not(call, after)
        if is_true_on_any_rank(refusal is not None) or after is None:
            raise Conflict(refusal or "memory is not released: another rank refuses it")
        self._pause.hold_for_memory(f"{_list(call.tags)} are being released. {BRINGS_BACK}")
        # a commit after the freeze may still be swapping, on another stream than the copy's
        self._boundary.drain()
        # trainers written for SGLang send no draft, and a draft changes no token
        keeps_drafts = call.keep_weights is None
        drafts = self._occupants.weights_of_drafts() if keeps_drafts else {}
        prepared = self._prepared = _Prepared(events, after, drafts)

        def copy() -> Done:
            prepared.copy = self.copy_for(prepared)
            return Done()

        # after all jobs of dropped updates: the shadow belongs to the scheduler's thread then
        self._staging.when_idle(call, copy)

    def release(self, call: ReleaseCall) -> None:
        """Release the memory. Raise ``HalfDone`` if any rank of the replica fails.

        All ranks of the replica then resume their memory: one rank alone would make a step
        without the others.
        """
        prepared = self._take_prepared()
        started = time.perf_counter()
        moved: dict[str, int] = {}
        failure: Exception | None = None
        try:
            self._release_memory(prepared, moved)
        except Exception as error:
            failure = error
        if is_true_on_any_rank(failure is not None):
            self._return([kind for kind in prepared.events if kind in released(self._memory)], {})
            self._update_hold()
            raise HalfDone(
                "some ranks released their memory, and resumed all of it except the shadow: "
                f"{failure or 'another rank failed'}"
            )
        self._update_hold()
        self._answer(call, moved, started)

    def _release_memory(self, prepared: _Prepared, moved: dict[str, int]) -> None:
        if WEIGHTS in prepared.events:
            self._stop_reading("the weights' memory is released")
        before = bytes_in_use(self._device)
        self._staging.forget_shadows()
        trim(self._device)
        moved[SHADOW] = max(0, before - bytes_in_use(self._device))
        if KV_CACHE in prepared.events:
            self._boundary.flush(empty_cache=False)
        self._copy = prepared.copy or self._copy
        if WEIGHTS in prepared.events:
            self._kept = frozenset(prepared.drafts)
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
            self._live.move(Lose())

    def cancel_release(self, call: CancelReleaseCall) -> None:
        """Cancel the release. Succeed also where this rank refused it."""
        if self._prepared is not None:
            self._take_prepared().given_up = True
            self._update_hold()
        # answered after the staging thread's last read of the weights
        self._staging.when_idle(call, Done)

    def _take_prepared(self) -> _Prepared:
        if self._prepared is None:
            raise Conflict("this rank has not voted for a release")
        prepared, self._prepared = self._prepared, None
        return prepared

    def _events_of(self, call: PrepareReleaseCall) -> dict[str, Event]:
        events = dict.fromkeys(call.tags, Event.KEEP)
        # Weights are not lost without a saver, or with --enable-weights-cpu-backup. Weights that
        # no update can bring must not be lost.
        can_be_lost = self._saver.enabled and not self._is_backup_wanted and self._why_kept is None
        if WEIGHTS in events and (
            # a copy of hollow weights is hollow
            self._live.hollow is not None or (can_be_lost and call.keep_weights != "host")
        ):
            events[WEIGHTS] = Event.DISCARD
        return events

    @property
    def _why_kept(self) -> str | None:
        """Reason why weights are always kept, or None where the caller may discard them."""
        if get_parallel().pp_size > 1:
            # a stage with whole weights would step, and wait for a stage with hollow ones
            return "because the stages of a pipeline may have whole weights in different turns"
        if (why := self._staging.refusal or self._staging.why_not_filled) is not None:
            return f"because no update can send them: {why}"
        return None

    @property
    def _is_backup_wanted(self) -> bool:
        return get_exec().features.enable_weights_cpu_backup

    def _why_not(self, call: PrepareReleaseCall, after: Memory | None) -> str | None:
        """Return why memory cannot be released, or None if it can."""
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
            return "weights are shared with other engines (--weight-cache-mode): keep them"
        return self._why_needed(tags)

    def _why_needed(self, tags: list[str]) -> str | None:
        # first, because it processes a result, and that may end requests
        is_idle = self._boundary.is_fully_idle()
        running = len(self._boundary.requests.running())
        waiting = len(self._boundary.requests.waiting())
        match self._pause.state:
            case PauseState.FROZEN:
                # running requests need their KV; no step reads the weights
                is_needed = running > 0 and set(tags) != {WEIGHTS}
            case PauseState.RUNNING:
                is_needed = not is_idle
            case PauseState.DRAINING:
                return "memory cannot be released: a pause still waits for requests to end"
        if not is_needed:
            return None
        return (
            f"memory cannot be released: {running} requests run and {waiting} wait. Let them "
            'end, or pause with mode "retract" or "abort". A pause of mode "in_place" allows '
            "only the weights"
        )

    def copy_for(self, prepared: _Prepared) -> Copy | None:
        """Copy the weights, or the tensors that no update brings. Return None for no copy.

        Runs on the staging thread. No update is open, so no other thread writes the weights.
        """
        if WEIGHTS not in prepared.events or not self._saver.enabled or self._saver_copies:
            return None
        if prepared.after[WEIGHTS] is Where.AWAY:
            kept = self._occupants.all_of_models()
        else:
            kept = itertools.chain(
                self._occupants.tensors_not_in_checkpoints(), *prepared.drafts.values()
            )
        return copy_of(kept, self._device, prepared.check)

    # ---- resume ----------------------------------------------------------------------

    def prepare_resume(self, call: PrepareResumeCall) -> None:
        if self._after_return(call.tags) is None:
            held = [tag for tag in call.tags if tag not in released(self._memory)]
            raise Conflict(f"memory was not released: {_list(held)}")
        if self._device.type != "cpu" and self._saver.enabled:
            free, _ = torch.get_device_module(self._device).mem_get_info(self._device)
            needed = sum(self._bytes.get(tag, 0) for tag in call.tags)
            if free < needed:
                raise Conflict(
                    f"memory cannot be resumed: {_list(call.tags)} need {needed >> 20} MiB, "
                    f"and {free >> 20} MiB are free on {self._device}"
                )
        self._answers.succeed(call, Done())

    def resume(self, call: ResumeCall) -> None:
        """Resume the memory. Raise ``HalfDone`` if a rank fails: all ranks stay frozen then."""
        started = time.perf_counter()
        if self._after_return(call.tags) is None:
            raise Conflict(f"memory was not released: {_list(call.tags)}")
        moved: dict[str, int] = {}
        failure: Exception | None = None
        try:
            self._return(call.tags, moved)
        except Exception as error:
            failure = error
        if is_true_on_any_rank(failure is not None):
            raise HalfDone(f"memory did not come back: {failure or 'another rank failed'}")
        self._until_filled = call.until_filled and self._live.hollow is not None
        self._update_hold()
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
            was_lost = self._memory[kind] is Where.LOST
            after = self._after_return([kind])
            assert after is not None
            self._memory = after
            if was_lost:
                self._live.move(Empty("they were released and no copy was kept", self._kept))
            moved[kind] = max(0, bytes_in_use(self._device) - before)

    # ---- queries -----------------------------------------------------------------------

    def describe(self, status: MemoryStatus) -> MemoryStatus:
        """Return ``status`` with the kinds of memory that are released."""
        away = {kind: self._memory[kind].value for kind in released(self._memory)}
        return msgspec.structs.replace(status, **away)

    def follow_contents(self) -> None:
        """Continue, or hold back, after the weights have been filled or overwritten."""
        # requests already waiting for hollow weights keep waiting
        self._until_filled = self._until_filled and self._live.hollow is not None
        self._update_hold()

    def _update_hold(self) -> None:
        """Hold generation back while memory is released or weights are awaited; else release it."""
        if away := released(self._memory):
            self._pause.hold_for_memory(f"{_list(away)} are released. {BRINGS_BACK}")
        elif self._live.hollow is not None and self._until_filled:
            self._pause.hold_for_memory(
                f"the weights are hollow, {self._live.hollow}. Send all weights by updates to "
                "continue"
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


@PARTS.join()
def make_memory_release(controller: Controller) -> MemoryRelease:
    return MemoryRelease(
        controller.scheduler,
        controller.boundary,
        controller.pause,
        controller.staging,
        controller.live,
        controller.answers,
        stop_reading=controller.stop_reading_weights,
    )


@CALLS.join()
def handlers_of_releases(controller: Controller) -> dict[type[InflightCall[Any]], Handler]:
    release = controller.part(MemoryRelease)
    return {
        PrepareReleaseCall: release.prepare_release,
        ReleaseCall: release.release,
        CancelReleaseCall: release.cancel_release,
        PrepareResumeCall: release.prepare_resume,
        ResumeCall: release.resume,
    }


@CONTENTS.join()
def follow_contents(controller: Controller) -> None:
    controller.part(MemoryRelease).follow_contents()


@STATUSES.join()
def describe(controller: Controller, described: Described) -> None:
    described.memory = controller.part(MemoryRelease).describe(described.memory)


def _list(kinds: Iterable[str]) -> str:
    return ", ".join(sorted(kinds))

"""Takes turns between the served version and the previous one, for requests pinned to the latter.

Each of the two versions has batches of its own: the running one, and the last one launched. The
scheduler holds the batches of the version whose turn it is, and the others are parked, as a
pipeline's loop does with its microbatches. Requests without a pin belong to the served version.

A turn of the previous version exchanges the weights, launches one forward, and exchanges them back
(``LiveWeights.previous_in_place``). So every message, every step of another version and the staging
thread find the served weights in place. On a device the exchanges and the forward are enqueued on
one stream. While the served version has work, the previous one has at most every k-th step.

**All ranks take the same turns.** A turn follows from the requests, the results and the messages at
a boundary, and from a count of steps. These are the same on all ranks of a replica.

**Overlap scheduling.** The loop processes the result of the last launched batch one step later,
whichever version the batch had. ``scheduler.last_batch`` remains that batch, because the loop asks
by it whether a result is due. ``choose`` passes on the last batch of the turn's own version.

After a commit the requests pinned to the weights served before belong to the previous version. If
all running requests do, the batches change hands. Otherwise these requests return to the queue, and
their KV is recomputed with their own weights. The same holds after a rollback.

A prompt in chunks, and a beam search, keep the turn. Where memory is short, requests of the
previous version return to the queue first. When none of them finds room, the served version admits
no newcomers until one does.

Only the scheduler's thread runs this module, at step boundaries and at launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.managers.schedule_batch import ScheduleBatch as Batch

from sglang_inflight.extensions.pins import PinsSettings
from sglang_inflight.extensions.pins.pins import Pins
from sglang_inflight.messages import Described
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.controller import (
    BATCHES,
    BOUNDARIES,
    CHOICES,
    ENTRIES,
    FORWARDS,
    PARTS,
    STATUSES,
    ChooseBatch,
    Controller,
    MayRun,
)
from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.scheduler.update.live_machine import Previous
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.settings import read

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch

    from sglang_inflight.sglang_types import Scheduler

Choose = Callable[..., "NextBatchPlan"]


@dataclass(slots=True)
class Parked:
    """The batches of the version whose turn it is not.

    ``last`` is the version's last launched batch, with its result processed.
    """

    running: ScheduleBatch
    last: ScheduleBatch | None = None


class Turns:
    """Turns of two versions on one scheduler. Nothing changes while no request is pinned."""

    def __init__(
        self,
        scheduler: Scheduler,
        boundary: Boundary,
        live: LiveWeights,
        pins: Pins,
        *,
        every: int,
    ) -> None:
        """``every``: the previous version has at most every k-th step of a busy server."""
        self._scheduler = scheduler
        self._boundary = boundary
        self._requests = boundary.requests
        self._live = live
        self._pins = pins
        self._every = every
        # None while no request is pinned to a version
        self._parked: Parked | None = None
        # whether the scheduler's batches are the previous version's
        self._is_previous = False
        # steps of the served version since the last one of the previous version
        self._steps = 0
        # whether requests of the previous version found no room at its last turn
        self._is_starved = False
        # whether the turn's version begins to run no waiting request
        self._holds_newcomers = False

    @property
    def are_taken(self) -> bool:
        """Whether a request is pinned, so that turns are taken."""
        return self._parked is not None

    def count_of_previous(self) -> int:
        """Return how many requests need the previous version."""
        if not self.are_taken:
            return 0
        return sum(self._pins.is_of_previous(req) for req in self._all())

    def enqueue(self, req: Req) -> None:
        """Look up the weights of a request, new or retracted, on its way into the queue."""
        if self._pins.admit(req) and not self.are_taken:
            self._park(Parked(_empty()))

    def choice(self) -> MayRun | None:
        """Return what tells whether the turn's version may begin to run a waiting request."""
        return None if self._parked is None else self._admits

    def _admits(self, req: Req) -> bool:
        is_of_turn = self._pins.is_of_previous(req) == self._is_previous
        return is_of_turn and not self._holds_newcomers and self._pins.why_not(req) is None

    def settle(self) -> None:
        """End requests whose weights are lost, and sort the others by their version.

        Called at every boundary, after the messages were handled.
        """
        for req in self._scheduler.grammar_manager.grammar_queue:
            self.enqueue(req)
        if not self.are_taken:
            return
        pinned = [
            req
            for req in self._all()
            if record_of(req).weights is not None and not self._boundary.is_ending(req)
        ]
        if not pinned:
            self._end()
            return
        lost = [req for req in pinned if self._pins.why_not(req) is not None]
        if lost:
            self._end_requests(lost)
        self._sort()

    def choose(self, choose: Choose) -> NextBatchPlan | None:
        """Choose the next batch by ``choose``, SGLang's function of two batches of one version.

        Return None while no request is pinned.
        """
        if self._parked is None:
            return None
        scheduler, last = self._scheduler, self._scheduler.last_batch
        is_due = self._is_due()
        if is_due != self._is_previous and self._may_switch():
            last = self._switch(last)
        plan = self._choose(choose, last, is_due=is_due)
        if plan.batch_to_run is None and self._may_switch():
            self._is_starved = self._is_previous and self._has_work(
                self._scheduler.waiting_queue, is_previous=True
            )
            if self._has_work(self._all(), is_previous=not self._is_previous):
                scheduler.running_batch = plan.running_batch
                plan = self._choose(choose, self._switch(None), is_due=False)
        if plan.batch_to_run is not None:
            self._is_starved = self._is_starved and not self._is_previous
            self._steps = 0 if self._is_previous else self._steps + 1
        return plan

    def previous(self) -> Previous | None:
        """Return the previous version in a turn of its own, else None."""
        return self._live.reachable if self._is_previous else None

    def _choose(self, choose: Choose, last: ScheduleBatch | None, *, is_due: bool) -> NextBatchPlan:
        self._holds_newcomers = not self._is_previous and (is_due or self._is_starved)
        self._make_room(last)
        return choose(running_batch=self._scheduler.running_batch, last_batch=last)

    # ---- whose turn it is ----------------------------------------------------------

    def _is_due(self) -> bool:
        """Return whether the next step is the previous version's."""
        everyone = self._all()
        if not self._has_work(everyone, is_previous=True):
            return False
        return self._steps >= self._every - 1 or not self._has_work(everyone, is_previous=False)

    def _has_work(self, reqs: Iterable[Req], *, is_previous: bool) -> bool:
        return any(self._pins.is_of_previous(req) == is_previous for req in reqs)

    def _may_switch(self) -> bool:
        scheduler = self._scheduler
        searches = any(req.beam_group is not None for req in scheduler.running_batch.reqs)
        return scheduler.chunked_req is None and not searches

    def _all(self) -> list[Req]:
        """Return every unfinished request, in an order that all ranks share."""
        scheduler = self._scheduler
        waiting = (*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue)
        every = dict.fromkeys((*self._here(), *self._there(), *waiting))
        return [req for req in every if not req.finished()]

    def _here(self) -> list[Req]:
        """Return the requests of the scheduler's batches."""
        scheduler = self._scheduler
        chunked = scheduler.chunked_req
        batches = (scheduler.running_batch, scheduler.last_batch)
        held = [req for batch in batches if batch is not None for req in batch.reqs]
        return held if chunked is None else [*held, chunked]

    def _there(self) -> list[Req]:
        """Return the requests of the parked batches."""
        return [req for batch in self._requests.parked_batches for req in batch.reqs]

    def _switch(self, last: ScheduleBatch | None) -> ScheduleBatch | None:
        """Park the scheduler's batches and take the parked ones; return the last one of these."""
        scheduler, parked = self._scheduler, self._parked
        assert parked is not None
        self._park(Parked(scheduler.running_batch, last))
        scheduler.running_batch = parked.running
        self._is_previous = not self._is_previous
        last = parked.last
        # its requests may have been retracted
        return None if last is None or last.is_empty() else last

    def _park(self, parked: Parked | None) -> None:
        """Park batches. The core counts their requests as running."""
        self._parked = parked
        batches = [] if parked is None else [parked.running, parked.last]
        self._requests.parked_batches = [batch for batch in batches if batch is not None]

    def _end(self) -> None:
        """Go back to one version, when no request is pinned any more."""
        if self._is_previous:
            scheduler = self._scheduler
            self._boundary.drain()
            scheduler.last_batch = self._switch(scheduler.last_batch)
        self._park(None)
        self._steps, self._is_starved = 0, False

    # ---- requests ------------------------------------------------------------------

    def _end_requests(self, reqs: list[Req]) -> None:
        """End requests whose weights are lost. No forward can give the running ones an end."""
        self._boundary.retract_some(reqs)
        reasons = {req: self._pins.why_not(req) for req in reqs if not req.finished()}
        self._boundary.end({req: why for req, why in reasons.items() if why is not None})

    def _sort(self) -> None:
        """Sort running requests by their version, after a commit or a rollback."""
        here = set(self._here())
        both = dict.fromkeys((*self._here(), *self._there()))
        running = [req for req in both if not req.finished()]
        wrong = [
            req
            for req in running
            if self._pins.is_of_previous(req) != (self._is_previous == (req in here))
        ]
        if not wrong:
            return
        if len(wrong) == len(running):
            self._is_previous = not self._is_previous
            return
        self._boundary.retract_some(wrong)

    def _make_room(self, last: ScheduleBatch | None) -> None:
        """Retract the previous version's requests if the turn's next decode step lacks memory.

        SGLang retracts within one version's batches, and ends the last request that has no room.
        """
        batches = [self._scheduler.running_batch, last]
        if all(not batch or batch.is_empty() or batch.check_decode_mem() for batch in batches):
            return
        reqs = dict.fromkeys((*self._here(), *self._there(), *(last.reqs if last else ())))
        of_previous = [req for req in reqs if self._pins.is_of_previous(req)]
        if of_previous and len(of_previous) < len(reqs):
            self._boundary.retract_some(of_previous)
            if last is not None:
                last.filter_batch(reqs_to_exclude=of_previous)


def _empty() -> Any:
    return Batch(reqs=[], batch_is_full=False)


@PARTS.join()
def make_turns(controller: Controller) -> Turns:
    return Turns(
        controller.scheduler,
        controller.boundary,
        controller.live,
        Pins(controller.live, controller.versions),
        every=read(PinsSettings).previous_every,
    )


# before a request gets other labels than its version's
@ENTRIES.join(order=-1)
def enqueue(controller: Controller, req: Req) -> None:
    controller.part(Turns).enqueue(req)


@BOUNDARIES.join()
def at_boundary(controller: Controller) -> Callable[[], None]:
    return controller.part(Turns).settle


@CHOICES.join()
def choice_of_requests(controller: Controller) -> Callable[[], MayRun | None]:
    return controller.part(Turns).choice


@BATCHES.join()
def choice_of_batch(controller: Controller) -> ChooseBatch:
    return controller.part(Turns).choose


@FORWARDS.join()
def version_of_forward(controller: Controller) -> Callable[[], Previous | None]:
    return controller.part(Turns).previous


@STATUSES.join()
def count_of_previous(controller: Controller, described: Described) -> None:
    described.weights = msgspec.structs.replace(
        described.weights, pinned_to_previous=controller.part(Turns).count_of_previous()
    )

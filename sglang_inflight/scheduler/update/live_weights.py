"""The live weights of a rank, and the previous version."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sglang_inflight.scheduler.update.made_by_forwards import MadeByForwards
from sglang_inflight.scheduler.update.swap import PreparedSwap
from sglang_inflight.vocabulary.labels import VersionLabel

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import Scheduler


@dataclass(frozen=True)
class Previous:
    """The version moved to the shadow by the last swap, and the swap back."""

    label: VersionLabel
    # as ``LiveWeights.weights``
    weights: int
    # None if never computed: then no rollback is possible
    digest: str | None
    swap: PreparedSwap
    # a KV scale in which this version differs from the served one, see ``Voted``
    kv_scale: str | None = None

    @property
    def version(self) -> str:
        return self.label.version


class DeviceSwap:
    """Begin and end of a swap on the device, between earlier and later forwards."""

    def __init__(self, began: Any, ended: Any) -> None:
        """Keep two events with timing enabled."""
        self._began = began
        self.ended = ended

    def is_done(self) -> bool:
        done: bool = self.ended.query()
        return done

    def wait(self) -> None:
        self.ended.synchronize()

    def milliseconds(self) -> float:
        """Return the duration of a finished swap."""
        took: float = self._began.elapsed_time(self.ended)
        return took


class LiveWeights:
    """State of one rank's live weights. Only the scheduler's thread writes this object.

    A thread that saves the weights reads ``exchanges``, ``weights``, ``why_not_served`` and
    ``swapped`` (``served/copying.py``). The interpreter replaces each one at once.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # number of the served contents: a commit begins a new one, a rollback returns to one
        self.weights = 0
        self._newest = 0
        # odd while an exchange is being made, or the previous version is in place
        self.exchanges = 0
        # digest of all live weights; None if unknown
        self.digest: str | None = None
        # why the weights are partially written, or None; only in the mode "off"
        self.dirty: str | None = None
        self._dirty_since = 0.0
        # seconds for which the last commit's update held requests back, written in place
        self.held_s = 0.0
        # whether the version's label describes the weights
        self.is_named = True
        # roles of the partially written models
        self.torn: set[str] = set()
        # why the contents are undefined, until updates have written every element; or None
        self.hollow: str | None = None
        # roles of the models that have their contents nevertheless
        self.kept = frozenset[str]()
        # whether the unwritten elements of hollow weights bear marks
        self.is_marked = False
        self.previous: Previous | None = None
        # whether the shadow still holds ``previous``
        self.holds_previous = False
        # None on a CPU
        self.last_swap: DeviceSwap | None = None
        # swaps that nobody will make again, each with the device's last swap at that time
        self._given_up: deque[tuple[DeviceSwap | None, PreparedSwap]] = deque()
        # frees what a swap holds: thousands of tensors, so not on this thread
        self.free: Callable[[PreparedSwap], None] = PreparedSwap.free
        # of each model
        self.made_by_forwards: Sequence[MadeByForwards] = ()

    @property
    def swapped(self) -> Any:
        """The device's event after the last swap. The shadow is not written before it."""
        return None if self.last_swap is None else self.last_swap.ended

    def launched(self) -> Any:
        """Return the device's event after all forwards and swaps launched so far; None on a CPU.

        Staging copies tensors that forwards have made beside the weights.
        """
        scheduler = self._scheduler
        if scheduler.device == "cpu":
            return None
        event = scheduler.device_module.Event()
        scheduler.forward_stream.wait_stream(scheduler.device_module.current_stream())
        event.record(scheduler.forward_stream)
        return event

    @property
    def why_not_served(self) -> str | None:
        """Reason why no forward may use the weights, or None."""
        if self.hollow is not None:
            return f"The weights are hollow: {self.hollow}."
        return None if self.dirty is None else f"The weights are partially written: {self.dirty}."

    @property
    def reachable(self) -> Previous | None:
        """The previous version, if a swap brings it back now."""
        is_there = self.holds_previous and self.why_not_served is None
        return self.previous if is_there else None

    def become_hollow(self, why: str, kept: frozenset[str] = frozenset()) -> None:
        """Note that the weights have no contents, except those of the roles ``kept``."""
        self._begin_weights()
        self.kept = kept
        self.hollow, self.dirty, self.digest, self.is_marked = why, None, None, False
        self.torn.clear()

    def write_in_place(self, roles: Iterable[str]) -> None:
        """Note the write of a part of an update into the models of ``roles``."""
        self.become_dirty("an update was written in place and not completed", roles)

    def was_not_written(self) -> None:
        """Take back ``write_in_place``: the update ended before its first write."""
        self.dirty = None
        self.torn.clear()

    def become_dirty(self, why: str, roles: Iterable[str]) -> None:
        """Mark the models of ``roles`` as partially written. A whole update repairs them."""
        if self.hollow is not None:
            return
        self.torn.update(roles)
        if self.dirty is None:
            self._dirty_since = time.monotonic()
        self.dirty = why
        self.digest = None

    def lose_name(self) -> None:
        """Forget the served version until the next commit: something else wrote the weights."""
        self._begin_weights()
        self.forget_previous()
        self._reset_made()
        self.digest, self.is_named = None, False

    def lose_previous(self) -> None:
        """Give up the previous version: an update is staged over it."""
        self.holds_previous = False
        if self.previous is not None:
            self._give_up(self.previous.swap)
            self.previous = replace(self.previous, swap=PreparedSwap())

    def forget_previous(self) -> None:
        """Forget the previous version."""
        self.lose_previous()
        self.previous = None

    def _give_up(self, swap: PreparedSwap) -> None:
        """Free what ``swap`` holds when the device makes it no more.

        An exchange reads and writes its changes when the device gets to it. Torch does not know of
        that, and gives freed memory to the next user at once. The last swap comes after all earlier
        ones on the device.
        """
        if swap.is_possible:
            self._given_up.append((self.last_swap, swap))
            self.free_given_up()

    def free_given_up(self, *, wait: bool = False) -> None:
        """Have the swaps freed that the device makes no more, at each boundary.

        With ``wait`` all are freed when this method returns.
        """
        while self._given_up:
            last, swap = self._given_up[0]
            if wait and last is not None:
                last.wait()
            elif last is not None and not last.is_done():
                return
            del self._given_up[0]
            if wait:
                swap.free()
            else:
                self.free(swap)

    def swap_in(
        self,
        digest: str,
        swap: PreparedSwap,
        *,
        base: VersionLabel,
        returns_to: Previous | None = None,
        missing: int = 0,
        kv_scale: str | None = None,
    ) -> int:
        """Make the weights of ``digest`` live, and return the bytes swapped.

        ``base`` is the label of the weights live until now. ``returns_to`` is the version of a
        rollback. ``missing`` counts the elements of hollow weights not sent by any update so far.
        ``kv_scale``: one that this changes, see ``Voted``.
        """
        with self._exchanging():
            swapped, before = self._swap(swap), self.weights
            if returns_to is None:
                self._begin_weights()
            else:
                self.weights = returns_to.weights
        self.held_s = 0.0 if self.dirty is None else time.monotonic() - self._dirty_since
        self._reset_made()
        if self.previous is not None and self.previous.swap is not swap:
            self.lose_previous()
        if self.hollow is None and self.is_named:
            self.previous = Previous(base, before, self.digest, swap, kv_scale)
            self.holds_previous = swap.is_possible
        else:
            self._give_up(swap)
            self.previous, self.holds_previous = None, False
        if missing:
            self.hollow = f"{missing} elements of them were not sent yet"
            return swapped
        self.digest = digest
        self.dirty = self.hollow = None
        self.is_named = True
        self.torn.clear()
        return swapped

    @contextmanager
    def previous_in_place(self, previous: Previous) -> Iterator[None]:
        """Have the forwards launched in the block compute with ``previous``.

        No update is open, so the staging thread neither reads the weights nor writes the shadow.
        """
        with self._exchanging():
            self._swap(previous.swap)
            self._reset_made()
            try:
                yield
            finally:
                self._swap(previous.swap)
                self._reset_made()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Tell readers on other threads that the weights' memory holds another version."""
        self.exchanges += 1
        try:
            yield
        finally:
            self.exchanges += 1

    def _begin_weights(self) -> None:
        self._newest += 1
        self.weights = self._newest

    def _reset_made(self) -> None:
        """Have the next forward make its tensors anew of the weights now live."""
        for made in self.made_by_forwards:
            made.reset()

    def _swap(self, swap: PreparedSwap) -> int:
        """Swap between the forwards launched so far and those launched next.

        With overlap scheduling, and in a pipeline, forwards run on the forward stream, else on the
        loop's own, the current stream here. On the device the swap waits for the work on both
        streams, and later work on both waits for the swap. So it does not matter where a forward
        runs. The host waits for nothing. The shadow was complete before this rank voted, and the
        shadow's next user waits for the event.
        """
        scheduler = self._scheduler
        if scheduler.device == "cpu":
            return swap.make()
        device = scheduler.device_module
        loop, forward = device.current_stream(), scheduler.forward_stream
        began, ended = device.Event(enable_timing=True), device.Event(enable_timing=True)
        forward.wait_stream(loop)
        began.record(forward)
        with device.stream(forward):
            swapped = swap.make()
        ended.record(forward)
        loop.wait_event(ended)
        self.last_swap = DeviceSwap(began, ended)
        return swapped

"""The live weights of a rank, and the previous version."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_inflight.scheduler.forward_caches.caches import ForwardCaches
from sglang_inflight.scheduler.update.live_machine import (
    AnnounceWrite,
    Begin,
    Break,
    Commit,
    Contents,
    EndTurn,
    Event,
    Exchange,
    Filled,
    Hollow,
    Live,
    Lost,
    Overwrite,
    Previous,
    RollBack,
    Torn,
    Whole,
    Write,
    transition,
    why_not,
)
from sglang_inflight.scheduler.update.swap import PreparedSwap
from sglang_inflight.vocabulary.labels import VersionLabel

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import Scheduler

_NOT_COMPLETED = "an update was written in place and not completed"
_NO_SWAP = PreparedSwap()


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


class Swapped(NamedTuple):
    """An exchange of the weights for good."""

    nbytes: int
    # seconds for which the update held requests back, written in place
    held_s: float


class LiveWeights:
    """One rank's live weights: the machine's state (``live_machine.py``), and its effects.

    Only the scheduler's thread writes this object. A thread that saves the weights reads
    ``exchanges``, ``weights``, ``why_not_served`` and ``swapped``
    (``extensions/saves/copying.py``). The interpreter replaces each one at once.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._live = Live()
        # brings the previous version back, or exchanges nothing
        self._swap_back = _NO_SWAP
        # None on a CPU
        self.last_swap: DeviceSwap | None = None
        # swaps that nobody will make again, each with the device's last swap at that time
        self._given_up: deque[tuple[DeviceSwap | None, PreparedSwap]] = deque()
        self._free: Callable[[PreparedSwap], None] = PreparedSwap.free
        self._forward_caches: Mapping[str, ForwardCaches] = {}

    def attach(
        self, forward_caches: Mapping[str, ForwardCaches], free: Callable[[PreparedSwap], None]
    ) -> None:
        """Use what each model's forwards make, by role, and ``free`` for given up swaps.

        A swap holds thousands of tensors, so they are not freed on the scheduler's thread.
        """
        self._forward_caches, self._free = forward_caches, free

    # ---- the state -----------------------------------------------------------------

    @property
    def contents(self) -> Contents:
        return self._live.contents

    @property
    def weights(self) -> int:
        """Number of the served contents."""
        return self._live.weights

    @property
    def exchanges(self) -> int:
        """Odd while an exchange is being made, or the previous version is in place."""
        live = self._live
        return 2 * live.exchanged + (live.exchanging is not None)

    @property
    def digest(self) -> str | None:
        """Digest of all live weights; None if unknown, and unless they are whole."""
        return self.contents.digest if isinstance(self.contents, Whole) else None

    @property
    def dirty(self) -> str | None:
        """Why the weights are partially written, or None."""
        match self.contents:
            case Torn(why) | Lost(Torn(why)):
                return why
        return None

    @property
    def hollow(self) -> str | None:
        """Why updates must write all elements first, or None."""
        match self.contents:
            case Hollow(why) | Filled(was=Hollow(why)) | Lost(Hollow(why)):
                return why
        return None

    @property
    def is_named(self) -> bool:
        """Whether the version's label describes the weights, or the last whole ones."""
        return self._live.is_named

    @property
    def previous(self) -> Previous | None:
        return self._live.previous

    @property
    def why_not_served(self) -> str | None:
        """Reason why no forward may use the weights, or None."""
        return self._live.why_not_served

    @property
    def reachable(self) -> Previous | None:
        """The previous version, if a swap brings it back now."""
        return self._live.reachable

    # ---- the device ----------------------------------------------------------------

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

    # ---- events --------------------------------------------------------------------

    def move(self, event: Event) -> None:
        """Make the machine's transition. Raises ``Conflict`` if it is refused."""
        self._live = transition(self._live, event)
        if self._live.reachable is None:
            self._hold(_NO_SWAP)

    def why_not(self, event: Event) -> str | None:
        """Return why the machine refuses ``event``, or None."""
        return why_not(self._live, event)

    def announce_write(self, roles: Iterable[str]) -> None:
        """Note that a part of an update may be written into the models of ``roles`` from now on."""
        self.move(AnnounceWrite(_NOT_COMPLETED, frozenset(roles), time.monotonic()))

    def write_in_place(self, roles: Iterable[str], why: str = _NOT_COMPLETED) -> None:
        """Mark the models of ``roles`` as partially written. A whole update repairs them."""
        self.move(Write(why, frozenset(roles), time.monotonic()))

    def lose_name(self) -> None:
        """Forget the served version until the next commit: something else wrote the weights."""
        self.move(Overwrite())
        self._reset_forward_caches()

    # ---- exchanges -----------------------------------------------------------------

    def _hold(self, swap: PreparedSwap) -> None:
        """Have ``swap`` bring the previous version back, and give up the one before."""
        before, self._swap_back = self._swap_back, swap
        if before is not swap:
            self._give_up(before)

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
                self._free(swap)

    def swap_in(
        self,
        digest: str,
        swap: PreparedSwap,
        *,
        base: VersionLabel,
        missing: int = 0,
        kv_scale: str | None = None,
    ) -> Swapped:
        """Make the weights of ``digest`` live. The parameters are those of the event ``Commit``."""
        self.move(Begin(Exchange.COMMIT))
        nbytes, before = self._swap(swap), self.contents
        self._hold(swap)
        self.move(Commit(base, digest, swap.is_possible, missing, kv_scale))
        self._reset_forward_caches()
        held_s = time.monotonic() - before.since if isinstance(before, Torn) else 0.0
        return Swapped(nbytes, held_s)

    def swap_back(self, *, base: VersionLabel) -> Swapped:
        """Make the previous version live. ``base`` is the label of the weights live until now."""
        self.move(Begin(Exchange.ROLLBACK))
        nbytes = self._swap(self._swap_back)
        self.move(RollBack(base))
        self._reset_forward_caches()
        return Swapped(nbytes, 0.0)

    @contextmanager
    def previous_in_place(self, previous: Previous) -> Iterator[None]:
        """Have the forwards launched in the block compute with ``previous``.

        No update is open, so the staging thread neither reads the weights nor writes the shadow.
        """
        assert previous == self.previous
        self.move(Begin(Exchange.TURN))
        self._swap(self._swap_back)
        self._reset_forward_caches()
        try:
            yield
        finally:
            self._swap(self._swap_back)
            self._reset_forward_caches()
            self.move(EndTurn())

    def _reset_forward_caches(self) -> None:
        """Have the next forward make its tensors anew of the weights now live."""
        for caches in self._forward_caches.values():
            caches.reset()

    def _swap(self, swap: PreparedSwap) -> int:
        """Make ``swap``. If it fails, the weights are partially written."""
        try:
            return self._swap_between_forwards(swap)
        except BaseException:
            why = "an exchange of the weights failed"
            self.move(Break(why, frozenset(self._forward_caches), time.monotonic()))
            raise

    def _swap_between_forwards(self, swap: PreparedSwap) -> int:
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

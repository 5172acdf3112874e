"""The weights that a rank serves, and those that it served before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_inflight.scheduler.update.swap import PreparedSwap

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.scheduler import Scheduler


@dataclass(frozen=True)
class Previous:
    """What the shadow got when the live weights were swapped in, and how to swap it back."""

    version: str
    # None where it was never read, because no way leads back
    digest: str | None
    swap: PreparedSwap


class DeviceSwap:
    """When a swap began and ended on the device: behind the forwards before it, ahead of those
    after it.
    """

    def __init__(self, began: Any, ended: Any) -> None:
        """Events that measure time."""
        self._began = began
        self.ended = ended

    def is_done(self) -> bool:
        done: bool = self.ended.query()
        return done

    def wait(self) -> None:
        self.ended.synchronize()

    def milliseconds(self) -> float:
        """Once it is done."""
        took: float = self._began.elapsed_time(self.ended)
        return took


class LiveWeights:
    """What is known of the live weights of one rank. Only the scheduler's thread touches it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # of all of them; None: nobody has read them through
        self.digest: str | None = None
        # why they are a mixture; only in the mode "off"
        self.dirty: str | None = None
        # whether the label says what they are
        self._is_named = True
        # the models that are, by their roles
        self.torn: set[str] = set()
        # why nobody knows what is in them, until updates have written all of them
        self.hollow: str | None = None
        # whether what was not written since then bears marks
        self.is_marked = False
        self.previous: Previous | None = None
        # whether the shadow still has what ``previous`` says
        self.holds_previous = False
        # on a device
        self.last_swap: DeviceSwap | None = None

    @property
    def swapped(self) -> Any:
        """On a device: its event after the last swap. The shadow is not written before."""
        return None if self.last_swap is None else self.last_swap.ended

    @property
    def why_not_served(self) -> str | None:
        """None where a forward may use them."""
        if self.hollow is not None:
            return f"The weights are hollow: {self.hollow}."
        return None if self.dirty is None else f"The weights are a mixture: {self.dirty}."

    def become_hollow(self, why: str) -> None:
        self.hollow, self.dirty, self.digest, self.is_marked = why, None, None, False
        self.torn.clear()

    def write_in_place(self, roles: Iterable[str]) -> None:
        """A part of an update is written into those models."""
        self.become_dirty("an update was written in place and not completed", roles)

    def become_dirty(self, why: str, roles: Iterable[str]) -> None:
        """The models of ``roles`` are a mixture, which a whole update mends."""
        if self.hollow is not None:
            return
        self.torn.update(roles)
        self.dirty = why
        self.digest = None

    def lose_name(self) -> None:
        """They are served, and nobody knows what they are, until an update is committed."""
        self.forget_previous()
        self.digest, self._is_named = None, False

    def lose_previous(self) -> None:
        """An update begins to be staged over it."""
        self.holds_previous = False

    def forget_previous(self) -> None:
        """Its memory is given back."""
        self.previous, self.holds_previous = None, False

    def swap_in(
        self, digest: str, swap: PreparedSwap, *, base_version: str, missing: int = 0
    ) -> int:
        """Make the weights of ``digest`` live; returns the bytes swapped.

        ``base_version`` is the name of those that are live now. ``missing`` elements of hollow
        weights were sent by no update so far.
        """
        swapped = self._swap(swap)
        if self.hollow is None and self._is_named:
            self.previous = Previous(base_version, self.digest, swap)
            self.holds_previous = swap.is_possible
        else:
            self.forget_previous()
        if missing:
            self.hollow = f"{missing} elements of them were not sent yet"
            return swapped
        self.digest = digest
        self.dirty = self.hollow = None
        self._is_named = True
        self.torn.clear()
        return swapped

    def _swap(self, swap: PreparedSwap) -> int:
        """Between the forwards launched so far and those launched next.

        With overlap scheduling, and in a pipeline, forwards run on the forward stream, else
        on the loop's own, which is current here. The swap waits on the device for whatever
        is on either, and what comes next on either waits for the swap: so it does not matter
        where a forward runs. The host waits for nothing. The shadow was complete before this
        rank voted, and its next user waits for the event.
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

"""Torn weights: forwards that read some weights before an exchange, and others after it.

Forwards are replays of a captured graph, which sums up each weight. In one version all weights
are zeros; in the other one some or all elements are not. So the sums tell which version a forward
has read, and a mixture is neither. Both orders launch the same work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import card, weights
from benchmarks.gpu.card import need_card
from benchmarks.gpu.exchanges import Wrong, need_memory
from benchmarks.gpu.step import Step, Values, main, spread
from benchmarks.gpu.weights import Sizes
from sglang_inflight.scheduler.update.changes.encoding import bits_of
from sglang_inflight.scheduler.update.changes.exchange import Exchange
from sglang_inflight.scheduler.update.live_weights import DeviceSwap, LiveWeights
from sglang_inflight.scheduler.update.swap import SPARE_BYTES, ContentSwap, PreparedSwap
from sglang_inflight.vocabulary.labels import VersionLabel

LIMIT_S = 90
# even: the weights are as before afterwards
EXCHANGES = 200
# forwards queue up, so that an exchange without order meets some of them
FORWARDS_EACH = 6
SHARE = 0.1

LOOPS = ((True, "overlap"), (False, "no overlap"))
TORN = -1


class Loop:
    """A scheduler as ``LiveWeights`` sees it. Its own stream is the current one."""

    def __init__(self, on: torch.device, *, overlaps: bool) -> None:
        self.device = on.type
        self.device_module: Any = torch.get_device_module(on)
        self.forward_stream = None if on.type == "cpu" else self.device_module.Stream()
        self._overlaps = overlaps

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Launch forwards in the block where the scheduler does: on one of the two streams."""
        if self.forward_stream is None or not self._overlaps:
            yield
            return
        self.forward_stream.wait_stream(self.device_module.current_stream())
        with self.device_module.stream(self.forward_stream):
            yield


class Forwards:
    """Forwards over ``live``, which notes what each of them has read."""

    def __init__(self, live: Sequence[torch.Tensor], count: int) -> None:
        # a sum of int64 needs no conversion, whose copy a forward would read in place of the weight
        self._live = [bits_of(weight).view(torch.int64) for weight in live]
        on = live[0].device
        self._sums = torch.empty(len(live), dtype=torch.int64, device=on)
        self._seen = torch.full((count, len(live)), TORN, dtype=torch.int64, device=on)
        self._graph: Any = None
        self._read()
        if on.type != "cpu":
            self._graph = card.module().CUDAGraph()
            with card.module().graph(self._graph):
                self._read()

    def _read(self) -> None:
        for at, bits in enumerate(self._live):
            torch.sum(bits, 0, out=self._sums[at])

    def launch(self, at: int) -> None:
        """Launch the forward number ``at`` on the current stream."""
        if self._graph is None:
            self._read()
        else:
            self._graph.replay()
        self._seen[at].copy_(self._sums)

    def sums(self) -> torch.Tensor:
        """Return the sums of the weights as they are, after a wait for the device."""
        if self._sums.device.type != "cpu":
            card.module().synchronize()
        self._read()
        return self._sums.to("cpu", copy=True)

    def versions(self, of: Sequence[torch.Tensor]) -> list[int]:
        """Return the index in ``of``, the sums of each version, for each forward; or ``TORN``."""
        if self._seen.device.type != "cpu":
            card.module().synchronize()
        seen = self._seen.cpu()
        found = [TORN] * len(seen)
        for version, sums in enumerate(of):
            for at in (seen == sums).all(dim=1).nonzero().flatten().tolist():
                found[at] = version
        return found


class Trial:
    """Weights of zeros, an exchange that changes them, and forwards over them."""

    def __init__(self, sizes: Sizes, form: str, *, overlaps: bool, exchanges: int) -> None:
        need_memory(3 * sizes.nbytes)
        on = card.device()
        self.exchanges = exchanges
        self.loop = Loop(on, overlaps=overlaps)
        live = [torch.zeros(shape, dtype=torch.bfloat16, device=on) for shape in sizes.shapes]
        self.swap = FORMS[form](live)
        self.forwards = Forwards(live, exchanges * FORWARDS_EACH)
        self._sums = [self.forwards.sums()]
        self.swap.make()
        self._sums.append(self.forwards.sums())
        self.swap.make()
        self._expect_old("two exchanges")
        if torch.equal(*self._sums):
            raise Wrong("The exchange changes no sum.")

    def launch(self, turn: int) -> None:
        """Launch the forwards of one turn, between two exchanges."""
        for at in range(FORWARDS_EACH):
            with self.loop.forward():
                self.forwards.launch(turn * FORWARDS_EACH + at)

    def versions(self) -> list[int]:
        """Return the version that each forward has read: 0, 1 or ``TORN``."""
        found = self.forwards.versions(self._sums)
        self._expect_old("all exchanges")
        return found

    def _expect_old(self, after: str) -> None:
        if not torch.equal(self.forwards.sums(), self._sums[0]):
            raise Wrong(f"The weights are not the old ones after {after}.")


def _copies(live: list[torch.Tensor]) -> PreparedSwap:
    ones = [torch.empty_like(weight) for weight in live]
    for one in ones:
        bits_of(one).fill_(1)
    return PreparedSwap(
        ContentSwap(live[0].device, SPARE_BYTES), tuple(zip(live, ones, strict=True))
    )


def _changes(live: list[torch.Tensor]) -> PreparedSwap:
    changed, _ = weights.stage(live, SHARE)
    # nothing is swapped without a way, even if there are no pairs
    return PreparedSwap(ContentSwap(live[0].device, SPARE_BYTES), changes=Exchange(changed))


FORMS: dict[str, Callable[[list[torch.Tensor]], PreparedSwap]] = {
    "whole copies": _copies,
    "changes": _changes,
}


def wrong_order(trial: Trial) -> list[int]:
    """Exchange on a stream that waits for nothing, and that nothing waits for."""
    aside = card.module().Stream()
    for at in range(trial.exchanges):
        trial.launch(at)
        with card.module().stream(aside):
            trial.swap.make()
    return trial.versions()


def our_order(trial: Trial, values: Values) -> list[int]:
    """Commit by the class that does it in a server."""
    scheduler: Any = trial.loop
    live = LiveWeights(scheduler)
    swaps: list[DeviceSwap] = []
    for at in range(trial.exchanges):
        trial.launch(at)
        live.swap_in(str(at), trial.swap, base=VersionLabel(at, str(at)))
        if live.last_swap is not None:
            swaps.append(live.last_swap)
    versions = trial.versions()
    if swaps:
        values |= spread("swap_ms", [swap.milliseconds() for swap in swaps])
    return versions


def two_versions(trial: Trial) -> list[int]:
    """Compute with the new version, and with the previous one between two exchanges, in turns."""
    scheduler: Any = trial.loop
    live = LiveWeights(scheduler)
    live.swap_in("new", trial.swap, base=VersionLabel(0, "old"))
    for at in range(0, trial.exchanges, 2):
        trial.launch(at)
        previous = live.reachable
        assert previous is not None
        with live.previous_in_place(previous):
            trial.launch(at + 1)
    live.swap_in("old", trial.swap, base=VersionLabel(1, "new"))
    return trial.versions()


def expect(versions: list[int], first: int) -> None:
    """Raise ``Wrong`` unless forwards read versions ``first`` and 1 - ``first`` in turns."""
    wanted = [(first + at // FORWARDS_EACH) % 2 for at in range(len(versions))]
    wrong = [at for at, pair in enumerate(zip(versions, wanted, strict=True)) if len(set(pair)) > 1]
    if wrong:
        raise Wrong(
            f"{len(wrong)} of {len(versions)} forwards have read what they should not, "
            f"{versions.count(TORN)} of them torn weights; the first is number {wrong[0]}."
        )


def races() -> list[str]:
    """Return the races that the glass card has noted since the last call; a GPU notes none."""
    if not card.is_glass():
        return []
    found: list[str] = card.module().races()
    card.module().clear_races()
    return found


def expect_no_race() -> None:
    if found := races():
        raise Wrong(found[0])


def run(step: Step) -> None:
    if card.is_glass():
        # otherwise a launch in the wrong order raises, and no forward sees what it does
        os.environ["GLASS_RACES"] = "note"
    sizes = weights.models(small=step.small)["smaller model"]
    for form in FORMS:
        make = partial(Trial, sizes, form, exchanges=EXCHANGES)
        with step.part(f"{form}, wrong order") as values:
            need_card()
            values |= _counts(wrong_order(make(overlaps=True)))
            if found := races():
                values["races"] = len(found)
            # on the glass card a forward may come before or after an exchange as a whole
            if not values["torn_forwards"] and not found:
                raise Wrong("The wrong order has torn no forward, so the right one proves nothing.")
        for overlaps, name in LOOPS:
            with step.part(f"{form}, our order, {name}") as values:
                need_card()
                versions = our_order(make(overlaps=overlaps), values)
                values |= _counts(versions)
                expect(versions, 0)
                expect_no_race()
            with step.part(f"{form}, two versions, {name}") as values:
                need_card()
                versions = two_versions(make(overlaps=overlaps))
                values |= _counts(versions)
                expect(versions, 1)
                expect_no_race()


def _counts(versions: list[int]) -> Values:
    return {
        "exchanges": len(versions) // FORWARDS_EACH,
        "forwards": len(versions),
        "torn_forwards": versions.count(TORN),
    }


def names() -> list[str]:
    """Return the name of each part."""
    orders = [f"{what}, {name}" for _, name in LOOPS for what in ("our order", "two versions")]
    return [f"{form}, {what}" for form in FORMS for what in ("wrong order", *orders)]


if __name__ == "__main__":
    main("torn", "Torn weights under two streams", names(), run)

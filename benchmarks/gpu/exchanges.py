"""Measures exchanges of weights, and checks that two of them restore every byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psutil
import torch

from benchmarks.gpu import card, weights
from benchmarks.gpu.card import NotRun
from benchmarks.gpu.step import Values, spread, timed
from benchmarks.gpu.weights import Changed, Sizes, checksum
from sglang_inflight.scheduler.update.changes.exchange import Exchange
from sglang_inflight.scheduler.update.swap import SPARE_BYTES, ContentSwap, PreparedSwap

SHARES = (0.001, 0.01, 0.03, 0.1, 1.0)
# even numbers: the weights are as before afterwards
RUNS = 20
RUNS_OVER_THE_LINK = 6
WARM_UPS = 4
# a device reads and writes whole sectors
SECTOR_BYTES = 32


class Wrong(Exception):
    """The exchange has not done what it should; the message says what it did."""


def need_memory(nbytes: int) -> None:
    """Raise ``NotRun`` where the card has fewer than ``nbytes`` free."""
    if not card.has_card():
        return
    card.module().empty_cache()
    free, _ = card.module().mem_get_info()
    if free < nbytes:
        raise NotRun(f"It takes {nbytes >> 20} MiB of the card, and {free >> 20} MiB are free.")


def need_host_memory(nbytes: int) -> None:
    """Raise ``NotRun`` where the host has fewer than ``nbytes`` available."""
    available = psutil.virtual_memory().available
    if available < nbytes:
        raise NotRun(
            f"It takes {nbytes >> 20} MiB of the host, and {available >> 20} MiB are available."
        )


def measure_changes(values: Values, sizes: Sizes, share: float, *, on_host: bool = False) -> None:
    """Exchange ``share`` of a model's elements, and put into ``values`` what was seen of it.

    Raises ``Wrong`` if bytes are not as they should be.
    """
    # values and offsets, or the values of whole ranges; and some for what finds them
    kept = 0 if on_host else sizes.nbytes * min(1.0, 2 * share)
    need_memory(int(sizes.nbytes + 1.1 * kept) + (1 << 30))
    live = weights.make(sizes, card.device())
    begin = time.perf_counter()
    changed, expected = weights.stage(live, share, on_host=on_host)
    exchange = Exchange(changed)
    # the values of whole ranges are exchanged, changed or not
    elements = sum(len(part.values) for _, parts in changed for part in parts)
    values |= {
        "weights_bytes": sizes.nbytes,
        "exchanged_elements": elements,
        "values_bytes": elements * live[0].element_size(),
        "changes_bytes": sum(part.nbytes for _, parts in changed for part in parts),
        "staging_s": time.perf_counter() - begin,
        "moved_bytes": _moved(changed),
        "sectors_bytes": _sectors(changed),
    }
    values |= _measure(live, expected, exchange.make, RUNS_OVER_THE_LINK if on_host else RUNS)


def measure_copies(values: Values, sizes: Sizes, *, on_host: bool = False) -> None:
    """Exchange a model with a second copy of it, and put into ``values`` what was seen of it.

    ``on_host``: the copy is in pinned memory of the host. Raises ``Wrong`` if bytes are not as
    they should be.
    """
    need_memory(sizes.nbytes * (1 if on_host else 2) + 2 * SPARE_BYTES)
    if on_host:
        # torch rounds up to powers of two
        need_host_memory(2 * sizes.nbytes)
    live = weights.make(sizes, card.device())
    shadows = [
        torch.empty_like(weight, device="cpu", pin_memory=True)
        if on_host
        else torch.empty_like(weight)
        for weight in live
    ]
    for shadow in shadows:
        shadow.zero_()
    swap = PreparedSwap(
        ContentSwap(live[0].device, SPARE_BYTES), tuple(zip(live, shadows, strict=True))
    )
    # both are read and written
    values |= {"weights_bytes": sizes.nbytes, "moved_bytes": 4 * sizes.nbytes}
    # the shadows' checksum: all of them are 0
    values |= _measure(live, 0, swap.make, RUNS_OVER_THE_LINK if on_host else RUNS)


def _measure(
    live: Sequence[torch.Tensor], expected: int, make: Callable[[], int], runs: int
) -> Values:
    """Check and time ``make``, which exchanges ``live`` with what has the checksum ``expected``."""
    before = checksum(live)
    if before == expected:
        raise Wrong("The exchange would change nothing.")
    make()
    if checksum(live) != expected:
        raise Wrong("The weights are not the new ones after an exchange.")
    make()
    if checksum(live) != before:
        raise Wrong("The weights are not the old ones after two exchanges.")
    times = timed(make, runs=runs, warm_ups=WARM_UPS)
    # the host returns before the device is done
    enqueues = [_on_the_host(make) for _ in range(WARM_UPS)]
    if checksum(live) != before:
        raise Wrong("The weights are not the old ones after an even number of exchanges.")
    return spread("exchange_ms", times) | spread("enqueue_ms", enqueues)


def _on_the_host(make: Callable[[], int]) -> float:
    """Return the milliseconds for which ``make`` holds the caller."""
    if card.has_card():
        card.module().synchronize()
    begin = time.perf_counter()
    make()
    return (time.perf_counter() - begin) * 1e3


def _moved(changed: Changed) -> int:
    """Return the bytes that an exchange must read and write, offsets included."""
    parts = [part for _, found in changed for part in found]
    offsets = sum(part.offsets.nbytes for part in parts if part.offsets is not None)
    return 4 * sum(part.values.nbytes for part in parts) + offsets


def _sectors(changed: Changed) -> int:
    """Return about the bytes of ``_moved``, with the whole sectors in which the elements lie."""
    moved = float(_moved(changed))
    for weight, parts in changed:
        in_sector = SECTOR_BYTES // weight.element_size()
        for part in parts:
            if part.offsets is None:
                continue
            share = len(part.values) / part.length
            sectors = part.length / in_sector * (1 - (1 - share) ** in_sector)
            moved += 2 * (sectors * SECTOR_BYTES - part.values.nbytes)
    return round(moved)

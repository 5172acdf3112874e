"""Time on the scheduler's loop at a commit, by the number of changes, weights and modules.

No server runs, and no device: the ranks' parts, weights and modules are as many as those of real
models, and hold next to nothing. So the kernel, which a device runs beside the loop, is left out,
and what is left is the interpreter's work. ``table`` is the staging thread's, at the seal; ``call``
is the longest of its calls, in processor time: no other thread gets the interpreter meanwhile. A
commit makes an exchange of changes (or of pointers, on a CPU) and a reset; a turn of pinned
requests makes two of each.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, NamedTuple
from unittest import mock

import numpy as np
import torch
import typer
from torch import nn

from benchmarks.common import options
from benchmarks.common.report import Report, Summary
from sglang_inflight.scheduler.forward_caches.caches import ForwardCaches
from sglang_inflight.scheduler.update.changes import exchange, exchange_kernel
from sglang_inflight.scheduler.update.changes.encoding import BLOCK, PIECE, Changes, Part
from sglang_inflight.scheduler.update.changes.exchange import Exchange
from sglang_inflight.scheduler.update.swap import PreparedSwap, swap_for

CPU = torch.device("cpu")
# an RL step changes about one in a hundred of a block's elements
CHANGED = 655


class Rank(NamedTuple):
    """Counts of one rank of a model, whose updates change something everywhere."""

    name: str
    parts: int
    weights: int
    modules: int


RANKS = (
    Rank("8B", parts=8_000, weights=300, modules=390),
    Rank("84 GB of FP8", parts=84_000, weights=1_647, modules=2_745),
)


def main(
    turns: Annotated[int, typer.Option(min=1, help="measurements of each kind")] = 9,
    json: options.Json = None,
) -> None:
    """Milliseconds on the loop, for the changes of an 8B model and of a rank with 84 GB of FP8."""
    report = Report(
        "loop_time",
        ("rank", "parts", "weights", "modules", "table, s", "call, ms", "exchange, ms",
         "pointers, ms", "reset, ms", "turn, ms"),
        {"turns": turns},
    )  # fmt: skip
    torch.set_num_threads(1)
    medians = {}
    with torch.no_grad():
        for rank in RANKS:
            cells = measure(rank, turns)
            medians[rank.name] = {name: cell.median for name, cell in cells.items()}
            # a long call is as long each time, and a disturbance is not
            medians[rank.name]["call"] = cells["call"].low
            report.add(
                rank=rank.name,
                parts=rank.parts,
                weights=rank.weights,
                modules=rank.modules,
                **cells,
            )
    name = RANKS[-1].name
    large = medians[name]
    report.goal(f"{name}: turn, ms, below 1", large["turn"], at_most=1)
    commit = large["exchange"] + large["reset"]
    report.goal(f"{name}: commit of changes, ms, below 1", commit, at_most=1)
    report.goal(f"{name}: longest call at the seal, ms, below 1", large["call"], at_most=1)
    report.show()
    report.write(json)


def measure(rank: Rank, turns: int) -> dict[str, Summary]:
    """Return the cells of ``rank``: ``table`` in seconds, and milliseconds on the loop."""
    caches = ForwardCaches(model_of(rank.modules))
    caches.find()
    pairs = tuple((torch.empty(1), torch.empty(1)) for _ in range(rank.weights))
    pointers = PreparedSwap(swap_for(CPU), pairs)
    changed = changes_of(rank)
    seconds, calls = [], []
    with as_on_a_device():
        for _ in range(turns):
            # its table is freed before the next one is made, not meanwhile
            changes = PreparedSwap()
            began = time.perf_counter()
            changes = PreparedSwap(swap_for(CPU), changes=Exchange(changed))
            seconds.append(time.perf_counter() - began)
            calls.append(longest_call(changed))
        exchanges = milliseconds(changes.make, turns)
    resets = milliseconds(caches.reset, turns)
    return {
        "table": Summary.of(seconds),
        "call": Summary.of(calls),
        "exchange": Summary.of(exchanges),
        "pointers": Summary.of(milliseconds(pointers.make, turns)),
        "reset": Summary.of(resets),
        "turn": Summary.of(2 * (e + r) for e, r in zip(exchanges, resets, strict=True)),
    }


def longest_call(changed: Changes) -> float:
    """Return the milliseconds of processor time of the longest call that makes an exchange.

    The interpreter changes hands between calls. A clock would count what other processes take.
    """
    longest = 0.0
    last = time.thread_time()

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal longest, last
        longest = max(longest, time.thread_time() - last)
        last = time.thread_time()

    sys.setprofile(note)
    try:
        kept = Exchange(changed)
    finally:
        sys.setprofile(None)
    # a device frees a table faster than the host does
    del kept
    return 1000 * longest


def milliseconds(action: Callable[[], object], turns: int) -> list[float]:
    """Return how long each of ``turns`` calls took, after one that warms up."""
    took = []
    for _ in range(1 + turns):
        began = time.perf_counter()
        action()
        took.append(1000 * (time.perf_counter() - began))
    return took[1:]


def changes_of(rank: Rank) -> Changes:
    """Return parts with changes in every block. Their memory is too small for an exchange."""
    counts = np.full(PIECE // BLOCK, CHANGED)
    each = rank.parts // rank.weights
    return [
        (torch.empty(1), [_part(at, counts) for at in range(each)]) for _ in range(rank.weights)
    ]


def _part(at: int, counts: np.ndarray) -> Part:
    values, offsets = torch.empty(1, dtype=torch.int32), torch.empty(1, dtype=torch.uint16)
    return Part(at * PIECE, PIECE, values, offsets, counts, int(counts.sum()))


def model_of(modules: int) -> nn.Module:
    """Return a model of ``modules`` modules, with attributes like those of SGLang's layers."""
    layers = modules // 9
    return nn.Sequential(*(_Layer() for _ in range(layers)))


class _Layer(nn.Module):
    """Nine modules, four of them with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.ModuleList(_Linear() for _ in range(3))
        self.norm = _Norm()
        self.act, self.attn, self.mlp = nn.SiLU(), nn.Module(), nn.Module()


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1), requires_grad=False)
        self.register_parameter("bias", None)
        self.quant_config = None


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1), requires_grad=False)
        self.eps, self.cast = 1e-6, None


class _NoKernel:
    """Takes the kernel's place: a launch returns at once, as on a device."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *arguments: None


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Let exchanges of tensors on the host be launched in the block."""
    with (
        mock.patch.object(exchange_kernel, "_exchange", _NoKernel()),
        mock.patch.object(
            exchange, "_Reference", lambda changed: exchange_kernel.Launch(changed, CPU)
        ),
    ):
        yield


if __name__ == "__main__":
    typer.run(main)

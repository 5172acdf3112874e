"""Tokens/s with an update every two seconds, over the same server's without; and memory.

Windows with and without updates follow each other on one server. An update longer than its turn is
followed by the next at once; ``updates`` counts them. Memory is the scheduler's above its level
before the first update, in copies of the weights. ``own`` leaves out pages shared with the page
cache or the trainer.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import models, options
from benchmarks.common.load import Load, load
from benchmarks.common.memory import Memory, watched
from benchmarks.common.peers import Kind, Peer, start
from benchmarks.common.report import Report, Summary
from benchmarks.common.trainer import Trainer, Transport, trainer
from harness.server import schedulers

PAIR: tuple[Kind, Kind] = ("ours", "upstream")
TRANSPORTS: tuple[Transport, ...] = ("disk", "tensor")
# steps take longer for longer requests, so every window must see whole requests
MAX_TOKENS = 48


@dataclass
class Found:
    ratios: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    # seconds of generation that an update has cost
    lost_s: list[float] = field(default_factory=list)
    own_copies: list[float] = field(default_factory=list)
    all_copies: list[float] = field(default_factory=list)


def main(
    size: options.Size = "smollm2",
    streams: options.Streams = 4,
    window: Annotated[float, typer.Option(help="seconds of one window")] = 20,
    windows: Annotated[int, typer.Option(help="pairs of windows of each transport and start")] = 3,
    every: Annotated[float, typer.Option(help="seconds from one update to the next")] = 2,
    rounds: options.Rounds = 2,
    way: options.Way = None,
    json: options.Json = None,
) -> None:
    """Throughput and memory of a run with many updates."""
    report = Report(
        "sustained",
        ("server", "update", "ratio", "tokens/s without", "updates", "an update costs, s",
         "own memory", "all memory"),
        {"size": size, "streams": streams, "window": window, "every": every, "rounds": rounds},
        notes=[
            "ratio: tokens/s with updates over those of the windows before and after.",
            "updates: in one window. Memory: the most over the start, in copies of the weights.",
            "an update costs: the tokens that its window lacks, in seconds of generation.",
        ],
    )  # fmt: skip
    transports = (way,) if way else TRANSPORTS
    found: dict[tuple[Transport, Kind], Found] = defaultdict(Found)
    with tempfile.TemporaryDirectory() as folder:
        model = models.build(Path(folder), size)
        for _ in range(rounds):
            for transport in transports:
                for kind in PAIR:
                    with start(kind, model) as peer, trainer(peer, model) as sender:
                        run = _Run(peer, sender, transport, models.bytes_of(model), every)
                        coroutine = run.measure(found[transport, kind], streams, window, windows)
                        asyncio.run(coroutine)
    for (transport, kind), it in found.items():
        report.add(
            server=kind,
            update=transport,
            ratio=Summary.of(it.ratios),
            rate=Summary.of(it.rates),
            updates=Summary.of(it.updates),
            lost_s=Summary.of(it.lost_s),
            own_copies=Summary.of(it.own_copies),
            all_copies=Summary.of(it.all_copies),
        )
    for transport in transports:
        ours, theirs = (found[transport, kind] for kind in PAIR)
        kept, theirs_kept = (Summary.of(it.ratios).median for it in (ours, theirs))
        report.goal(f"ours, {transport}: ratio, at least 0.92", kept, at_least=0.92)
        report.goal(
            f"{transport}: ratio over upstream's, at least 1", kept / theirs_kept, at_least=1
        )
        report.goal(
            f"{transport}: what an update costs over what upstream's costs, at most 1.2",
            over(*(Summary.of(it.lost_s).median for it in (ours, theirs))),
            at_most=1.2,
        )
        most = max(ours.own_copies)
        report.goal(
            f"ours, {transport}: extra copies in own memory, at most 1.1", most, at_most=1.1
        )
    report.show()
    report.write(json)


@dataclass
class _Run:
    """One server from start to end."""

    peer: Peer
    sender: Trainer
    transport: Transport
    model_bytes: int
    every_s: float

    async def measure(self, found: Found, streams: int, window_s: float, windows: int) -> None:
        (scheduler,) = schedulers(self.peer.pid)
        memory = Memory(scheduler)
        async with (
            self.peer.client() as client,
            load(self.peer, client, streams, prompt_tokens=32, max_tokens=MAX_TOKENS) as running,
            watched(memory),
        ):
            await running.wait_for(arrivals=20)
            memory.begin()
            before = await _window(running, window_s)
            for _ in range(windows):
                updates, seconds, rate = await self._window_with_updates(running, window_s)
                after = await _window(running, window_s)
                ratio = rate / ((before + after) / 2)
                found.updates.append(updates)
                found.ratios.append(ratio)
                found.lost_s.append((1 - ratio) * seconds / updates)
                found.rates.append(after)
                before = after
        found.own_copies.append((memory.own - memory.first_own) / self.model_bytes)
        found.all_copies.append((memory.all - memory.first_all) / self.model_bytes)

    async def _window_with_updates(
        self, running: Load, window_s: float
    ) -> tuple[int, float, float]:
        """Return the number of updates, the seconds to the last one's end, and tokens/s in them."""
        began = time.perf_counter()
        count = 0
        while time.perf_counter() - began < window_s:
            due = began + count * self.every_s
            await asyncio.sleep(max(0, due - time.perf_counter()))
            await asyncio.to_thread(self.sender.update, self.transport)
            count += 1
        return count, time.perf_counter() - began, _rate(running, began)


def over(ours: float, theirs: float) -> float:
    """Return the ratio of two costs. A cost below zero is noise, and counts as none."""
    ours, theirs = max(ours, 0.0), max(theirs, 0.0)
    return ours / theirs if theirs else (math.inf if ours else 1.0)


async def _window(running: Load, window_s: float) -> float:
    began = time.perf_counter()
    await asyncio.sleep(window_s)
    return _rate(running, began)


def _rate(running: Load, began: float) -> float:
    now = time.perf_counter()
    return running.tokens(began, now) / (now - began)


if __name__ == "__main__":
    typer.run(main)

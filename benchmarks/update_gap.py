"""An update's effect on a stream's reader: its largest gap over its median gap.

Beside every update, streams of the same ages run for as long without one. Among many gaps the
largest is above the median anyway: that much is due to the machine, not to the update. The ages
matter, because a longer context makes longer steps.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import httpx
import typer

from benchmarks.common import models, options
from benchmarks.common.load import Load, load
from benchmarks.common.peers import NO_VLLM, Kind, Peer, every_kind, has_vllm, start
from benchmarks.common.report import Report, Summary
from benchmarks.common.trainer import Trainer, Transport, trainer

PAIR: tuple[Kind, Kind] = ("ours", "upstream")

QUIET_S = 3.0  # before each update
LINK_BYTES_PER_S = 100e6


@dataclass(frozen=True)
class Sample:
    """One stream during one update, and one without an update."""

    median_ms: float  # without the update
    largest_ms: float
    still_ms: float  # the largest without the update
    update_s: float
    rate: float  # tokens/s during the update over tokens/s before

    @property
    def ratio(self) -> float:
        return self.largest_ms / self.median_ms

    @property
    def still_ratio(self) -> float:
        return self.still_ms / self.median_ms


@dataclass(frozen=True)
class Run:
    """Streams before and during an action."""

    load: Load
    started: float  # time.perf_counter(), as below
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def rate(self) -> float:
        """Tokens/s during the action over tokens/s before."""
        before = self.load.tokens(self.started, self.began) / (self.began - self.started)
        during = self.load.tokens(self.began, self.ended) / self.seconds
        return during / before


def main(
    size: options.Size = "smollm2",
    streams: options.Streams = 4,
    updates: Annotated[int, typer.Option(help="of each transport and start")] = 3,
    rounds: options.Rounds = 2,
    # for a large model a distributed update alone takes minutes
    way: options.Way = None,
    json: options.Json = None,
) -> None:
    """Largest gap over median gap of running streams, for each way to send weights."""
    transports: list[Transport] = [way] if way else list(get_args(Transport))
    report = Report(
        "update_gap",
        (
            "server",
            "update",
            "largest / median gap",
            "without it",
            "largest, ms",
            "median, ms",
            "update, s",
            "rate",
        ),
        {"size": size, "streams": streams, "updates": updates, "rounds": rounds},
        notes=[
            "without it: the same of streams of the same ages, for as long without an update.",
            "rate: tokens/s during the update over those just before it.",
            "distributed: the trainer's link is held to 100 MB/s.",
            "vllm: pause, reload from disk, resume. It has no other way on a CPU.",
        ],
    )
    if not has_vllm():
        report.notes.append(NO_VLLM)
    samples: dict[tuple[Transport, Kind], list[Sample]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        model = models.build(Path(folder), size)
        report.facts["model_bytes"] = {size: models.bytes_of(model)}
        for _ in range(rounds):
            for kind in every_kind():
                with (
                    start(kind, model) as peer,
                    trainer(peer, model, bytes_per_s=LINK_BYTES_PER_S) as sender,
                ):
                    for what in ways_of(kind, transports):
                        samples[what, kind] += asyncio.run(
                            _measure(peer, sender, what, streams, updates)
                        )
    for (what, kind), found in sorted(samples.items()):
        _add_row(report, kind, what, found)
    for what in transports:
        ours, theirs = (Summary.of(s.ratio for s in samples[what, k]).median for k in PAIR)
        excess = Summary.of(s.largest_ms / s.still_ms for s in samples[what, "ours"]).median
        report.goal(f"ours, {what}: largest over median gap, at most 1.3", ours, at_most=1.3)
        report.goal(
            f"ours, {what}: largest gap over the largest without it, at most 1.15",
            excess,
            at_most=1.15,
        )
        report.goal(f"{what}: that ratio over upstream's, below 1", ours / theirs, at_most=1)
    report.show()
    report.write(json)


def ways_of(kind: Kind, transports: Sequence[Transport]) -> list[Transport]:
    """Return those of ``transports`` that a server has on a CPU."""
    return [what for what in transports if kind != "vllm" or what == "disk"]


def _add_row(report: Report, kind: Kind, what: Transport, samples: list[Sample]) -> None:
    report.add(
        server=kind,
        update=what,
        ratio=Summary.of(s.ratio for s in samples),
        still_ratio=Summary.of(s.still_ratio for s in samples),
        largest_ms=Summary.of(s.largest_ms for s in samples),
        median_ms=Summary.of(s.median_ms for s in samples),
        update_s=Summary.of(s.update_s for s in samples),
        rate=Summary.of(s.rate for s in samples),
    )


async def _measure(
    peer: Peer, sender: Trainer, what: Transport, streams: int, updates: int
) -> list[Sample]:
    await asyncio.to_thread(sender.update, what)  # joins groups, makes the shadow
    samples: list[Sample] = []
    async with peer.client() as client:
        for _ in range(updates):
            samples += await _one(peer, client, sender, what, streams)
    return samples


async def _one(
    peer: Peer, client: httpx.AsyncClient, sender: Trainer, what: Transport, streams: int
) -> list[Sample]:
    """Run an update, then as long a time without one."""
    update = await _run(peer, client, streams, asyncio.to_thread(sender.update, what))
    still = await _run(peer, client, streams, asyncio.sleep(update.seconds))
    return [
        Sample(
            median_ms=1000
            * statistics.median(
                one.gaps_within(update.started, update.began)
                + other.gaps_within(still.started, still.ended)
            ),
            largest_ms=1000 * one.largest_gap(update.began, update.ended),
            still_ms=1000 * other.largest_gap(still.began, still.ended),
            update_s=update.seconds,
            rate=update.rate,
        )
        for one, other in zip(update.load.streams, still.load.streams, strict=True)
    ]


async def _run(
    peer: Peer, client: httpx.AsyncClient, streams: int, what: Coroutine[Any, Any, object]
) -> Run:
    """Start fresh streams, wait for a quiet window, and then await ``what``."""
    async with load(peer, client, streams, prompt_tokens=32, max_tokens=4096) as running:
        await running.wait_for(arrivals=10)
        started = time.perf_counter()
        await asyncio.sleep(QUIET_S)
        began = time.perf_counter()
        await what
        ended = time.perf_counter()
        await running.wait_for(arrivals=3)
        return Run(running, started, began, ended)


if __name__ == "__main__":
    typer.run(main)

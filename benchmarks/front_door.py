"""Requests per second and their latency while tensors come by value.

A payload passes the process that takes in requests. Clients ask for one token each, and ask again
after each answer. Windows with and without updates follow each other on one server. Ours stages
beside the requests. Upstream's update blocks: it waits for running requests, and new ones wait for
it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.common import models, options
from benchmarks.common.load import generate
from benchmarks.common.peers import Kind, Peer, start
from benchmarks.common.report import Report, Summary
from benchmarks.common.trainer import Trainer, trainer

PAIR: tuple[Kind, Kind] = ("ours", "upstream")
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Answered:
    sent: float  # time.perf_counter()
    at: float

    @property
    def ms(self) -> float:
        return 1000 * (self.at - self.sent)


@dataclass(frozen=True)
class Window:
    """Requests that were answered in a time."""

    seconds: float
    rate: float
    latency: Summary  # ms
    updates: int

    @classmethod
    def of(cls, answers: list[Answered], start: float, end: float, updates: int) -> Window:
        """Count answers of a window. A request that waited for all of it counts in the latency."""
        within = [a for a in answers if start <= a.at < end]
        touching = [a.ms for a in answers if a.at >= start and a.sent < end]
        seconds = end - start
        return cls(seconds, len(within) / seconds, Summary.of(touching), updates)


@dataclass
class Found:
    without: list[Window] = field(default_factory=list)
    beside: list[Window] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


def main(
    size: options.Size = "tiny",
    clients: Annotated[int, typer.Option(min=1, help="that ask at a time")] = 16,
    megabytes: Annotated[int, typer.Option(min=1, help="of tensors in one update")] = 64,
    window: Annotated[float, typer.Option(help="seconds of one window")] = 10,
    windows: Annotated[int, typer.Option(min=1, help="pairs of windows of each start")] = 5,
    rounds: options.Rounds = 2,
    json: options.Json = None,
) -> None:
    """Rate and latency of short requests while tensors come by value, and without."""
    report = Report(
        "front_door",
        ("server", "tensors", "requests/s", "over without", "median, ms", "p95, ms", "largest, ms",
         "MB/s of tensors"),
        {
            "size": size, "clients": clients, "megabytes": megabytes, "window": window,
            "windows": windows, "rounds": rounds,
        },
        notes=[
            "by value: updates follow each other without a rest, each with one body.",
            "over without: requests/s over those of the windows before and after.",
        ],
    )  # fmt: skip
    found: dict[Kind, Found] = defaultdict(Found)
    with tempfile.TemporaryDirectory() as folder:
        model = models.build(Path(folder), size)
        for _ in range(rounds):
            for kind in PAIR:
                with start(kind, model) as peer, trainer(peer, model) as sender:
                    asyncio.run(
                        _measure(peer, sender, found[kind], clients, megabytes, window, windows)
                    )
    for kind, it in found.items():
        _add_row(report, kind, "none", it.without, None, megabytes)
        _add_row(report, kind, "by value", it.beside, Summary.of(it.ratios), megabytes)
    p95 = {kind: Summary.of(w.latency.p95 for w in it.beside).median for kind, it in found.items()}
    rates = {kind: Summary.of(it.ratios).median for kind, it in found.items()}
    report.goal(
        "p95 beside updates, ours over upstream's, below 1",
        p95["ours"] / p95["upstream"],
        at_most=1,
    )
    report.goal(
        "requests/s over those without, ours over upstream's, at least 1",
        rates["ours"] / rates["upstream"],
        at_least=1,
    )
    report.show()
    report.write(json)


def _add_row(
    report: Report,
    kind: Kind,
    tensors: str,
    windows: list[Window],
    ratio: Summary | None,
    megabytes: int,
) -> None:
    report.add(
        server=kind,
        tensors=tensors,
        rate=Summary.of(w.rate for w in windows),
        ratio=ratio,
        median_ms=Summary.of(w.latency.median for w in windows),
        p95_ms=Summary.of(w.latency.p95 for w in windows),
        largest_ms=Summary.of(w.latency.high for w in windows),
        sent=ratio and Summary.of(w.updates * megabytes / w.seconds for w in windows),
    )


async def _measure(
    peer: Peer,
    sender: Trainer,
    found: Found,
    clients: int,
    megabytes: int,
    window_s: float,
    windows: int,
) -> None:
    nbytes = megabytes * 1_000_000
    async with peer.client() as client:
        # makes the body, and the shadow
        await asyncio.to_thread(sender.send_by_value, nbytes)
        async with _asking(peer, client, clients) as answers:
            await asyncio.sleep(min(window_s, 2))
            before = await _window(answers, _nothing(window_s))
            for _ in range(windows):
                beside = await _window(answers, _updates(sender, nbytes, window_s))
                after = await _window(answers, _nothing(window_s))
                found.ratios.append(beside.rate / ((before.rate + after.rate) / 2))
                found.beside.append(beside)
                found.without.append(after)
                before = after


async def _nothing(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return 0


async def _updates(sender: Trainer, nbytes: int, seconds: float) -> int:
    """Update again and again for ``seconds``, and return how often."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        await asyncio.to_thread(sender.send_by_value, nbytes)
        count += 1
    return count


async def _window(answers: list[Answered], what: Coroutine[Any, Any, int]) -> Window:
    start = time.perf_counter()
    updates = await what
    end = time.perf_counter()
    return Window.of(answers, start, end, updates)


@asynccontextmanager
async def _asking(
    peer: Peer, client: httpx.AsyncClient, clients: int
) -> AsyncIterator[list[Answered]]:
    """Keep ``clients`` asking during the block."""
    answers: list[Answered] = []

    async def ask() -> None:
        while True:
            sent = time.perf_counter()
            await generate(peer, client, prompt_tokens=PROMPT_TOKENS, max_tokens=1)
            answers.append(Answered(sent, time.perf_counter()))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask()) for _ in range(clients)]
        try:
            yield answers
        finally:
            for task in tasks:
                task.cancel()


if __name__ == "__main__":
    typer.run(main)

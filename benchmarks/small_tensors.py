"""Slowdown of steps while thousands of small tensors are staged: Python's time, not bytes.

A step and the staging thread share one interpreter. Beside each update, streams of the same ages
run for as long without one, on the same server. So a machine is compared with itself, minutes
apart. The unpatched server loads the same checkpoint from disk, and makes no step meanwhile.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import httpx
import typer

from benchmarks.common import models, options
from benchmarks.common.load import load
from benchmarks.common.peers import Peer, start
from benchmarks.common.report import Report, Summary
from benchmarks.common.trainer import Small, Trainer, trainer

# "unpaced" is without the measured features: interpreter pacing, and the switch interval
SERVERS: dict[str, dict[str, str]] = {
    "ours": {},
    "unpaced": {
        "SGLANG_INFLIGHT_PACE_INTERPRETER": "1",
        "SGLANG_INFLIGHT_SWITCH_INTERVAL_S": "0",
    },
}
# per request: the KV pool has room for all of them at once
TOKENS = 1024


@dataclass(frozen=True)
class Steps:
    """Gaps between the tokens of all streams, in ms."""

    p95: float
    largest: float
    rate: float  # tokens/s

    @classmethod
    def of(cls, gaps: list[float], seconds: float) -> Steps:
        p95 = statistics.quantiles(gaps, n=20, method="inclusive")[18]
        return cls(1000 * p95, 1000 * max(gaps), len(gaps) / seconds)


@dataclass(frozen=True)
class Sample:
    update: Steps
    still: Steps  # as long a time without the update
    update_s: float


def main(
    size: options.Size = "experts-20k",
    streams: options.Streams = 16,
    updates: Annotated[int, typer.Option(min=1, help="of each way and start")] = 1,
    rounds: options.Rounds = 1,
    json: options.Json = None,
) -> None:
    """p95 and largest step of running streams while many small tensors are staged."""
    report = Report(
        "small_tensors",
        ("server", "tensors by", "p95, ms", "p95 over without", "largest, ms",
         "largest over without", "rate over without", "update, s"),
        {"size": size, "streams": streams, "rounds": rounds},
        notes=[
            "without: streams of the same ages, for as long without an update.",
            "unpaced: " + ", ".join("=".join(each) for each in SERVERS["unpaced"].items()),
            "The first update of a server proves its load plan, and is not measured.",
        ],
    )  # fmt: skip
    ways: list[Small] = list(get_args(Small))
    samples: dict[tuple[str, Small], list[Sample]] = defaultdict(list)
    blocked: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        model = models.build(Path(folder), size)
        for _ in range(rounds):
            for server, env in SERVERS.items():
                with start("ours", model, env=env) as peer, trainer(peer, model) as sender:
                    for way in ways:
                        sender.send_small(way)
                        samples[server, way] += asyncio.run(
                            _measure(peer, sender, way, streams, updates)
                        )
            with start("upstream", model) as peer, trainer(peer, model) as sender:
                blocked += [sender.update("disk").seconds for _ in range(updates + 1)][1:]
    for (server, way), found in samples.items():
        report.add(
            server=server,
            way=way,
            p95_ms=Summary.of(s.update.p95 for s in found),
            p95_ratio=Summary.of(s.update.p95 / s.still.p95 for s in found),
            largest_ms=Summary.of(s.update.largest for s in found),
            largest_ratio=Summary.of(s.update.largest / s.still.largest for s in found),
            rate_ratio=Summary.of(s.update.rate / s.still.rate for s in found),
            update_s=Summary.of(s.update_s for s in found),
        )
    for way in ways:
        p95 = {
            server: Summary.of(s.update.p95 / s.still.p95 for s in samples[server, way]).median
            for server in SERVERS
        }
        report.goal(f"ours, by {way}: p95 over that without, at most 1.5", p95["ours"], at_most=1.5)
        report.goal(
            f"by {way}: that over unpaced's, below 1", p95["ours"] / p95["unpaced"], at_most=1
        )
        ours = Summary.of(s.update_s for s in samples["ours", way]).median
        report.goal(
            f"ours, by {way}: update over upstream's, which blocks, below 1",
            ours / Summary.of(blocked).median,
            at_most=1,
        )
    report.show()
    report.write(json)


async def _measure(
    peer: Peer, sender: Trainer, way: Small, streams: int, updates: int
) -> list[Sample]:
    async with peer.client() as client:
        return [await _one(peer, client, sender, way, streams) for _ in range(updates)]


async def _one(
    peer: Peer, client: httpx.AsyncClient, sender: Trainer, way: Small, streams: int
) -> Sample:
    """Run an update, then as long a time without one."""
    update, seconds = await _run(peer, client, streams, asyncio.to_thread(sender.send_small, way))
    still, _ = await _run(peer, client, streams, asyncio.sleep(seconds))
    return Sample(update, still, seconds)


async def _run(
    peer: Peer, client: httpx.AsyncClient, streams: int, what: Coroutine[Any, Any, Any]
) -> tuple[Steps, float]:
    """Run ``what`` under fresh streams, and return their steps and its seconds."""
    async with load(peer, client, streams, prompt_tokens=32, max_tokens=TOKENS) as running:
        await running.wait_for(arrivals=10)
        began = time.perf_counter()
        done = await what
        # an update counts from its sending: the preparation before is the trainer's
        began = began if done is None else done.sent
        ended = time.perf_counter()
        await running.wait_for(arrivals=3)
        gaps = [gap for stream in running.streams for gap in stream.gaps_within(began, ended)]
        return Steps.of(gaps, ended - began), ended - began


if __name__ == "__main__":
    typer.run(main)

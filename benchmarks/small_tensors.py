"""Steps beside an update of thousands of small tensors, whose cost is Python's time, not bytes.

A step and the staging thread share one interpreter, and a small machine's cores and memory. So
streams of the same ages run three times on the same server, for as long each time:

    update     beside the update
    still      beside nothing
    control    beside a process that copies as many bytes in its own memory, evenly spread

The control says what any work of that size costs a step on this machine. The unpatched server
takes the same tensors by the same way, and makes no step meanwhile. Updates without streams tell
the update's own time, and the processor time that it takes beside the scheduler's thread.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args

import httpx
import typer
from safetensors import safe_open

from benchmarks.common import models, options
from benchmarks.common.load import load
from benchmarks.common.peers import Peer, start
from benchmarks.common.report import Report, Summary
from benchmarks.common.trainer import Small, Trainer, trainer
from harness.server import schedulers

UNPACED = {
    "SGLANG_INFLIGHT_PACE_INTERPRETER": "1",
    "SGLANG_INFLIGHT_SWITCH_INTERVAL_S": "0",
}
# per request: the KV pool has room for all of them at once
TOKENS = 1024
# for more tensors an update's own time is a goal
MANY = 100_000
# an update that takes longer is made once, and its steps are compared with those of so long
LONG_S = 20.0


@dataclass
class Steps:
    """Gaps between the tokens of all streams, in seconds, of several windows."""

    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, gaps: list[float], seconds: float) -> None:
        self.gaps += gaps
        self.seconds += seconds

    @property
    def p95(self) -> float:
        return statistics.quantiles(self.gaps, n=20, method="inclusive")[18]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return len(self.gaps) / self.seconds


@dataclass
class Found:
    """Updates of one server by one way. ``cpu_us``: beside the loop, of an update, for a tensor."""

    idle_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    # beside updates, as long without them, and as long beside another process's copies
    update: Steps = field(default_factory=Steps)
    still: Steps = field(default_factory=Steps)
    control: Steps = field(default_factory=Steps)


def main(
    size: options.Size = "experts-20k",
    streams: options.Streams = 16,
    updates: Annotated[
        int, typer.Option(min=1, help=f"of each way and start; 1 if it takes over {LONG_S:g} s")
    ] = 3,
    ways: Annotated[str, typer.Option(help="of sending, with commas between")] = ",".join(
        get_args(Small)
    ),
    rounds: options.Rounds = 1,
    unpaced: Annotated[
        bool, typer.Option("--unpaced", help="also a server without the paces of the interpreter")
    ] = False,
    json: options.Json = None,
) -> None:
    """p95 and largest step of running streams while many small tensors are staged."""
    servers = {"ours": {}, **({"unpaced": UNPACED} if unpaced else {})}
    sent_by = known_ways(ways)
    found: dict[tuple[str, Small], Found] = defaultdict(Found)
    first: list[float] = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        model = models.build(Path(folder), size)
        tensors, nbytes = _tensors_of(model), models.bytes_of(model)
        for _ in range(rounds):
            for server, env in servers.items():
                env = {**env, "SGLANG_INFLIGHT_CACHE": cache}
                with start("ours", model, env=env) as peer, trainer(peer, model) as sender:
                    first.append(sender.send_small(sent_by[0]).seconds)
                    for what in of_server(server, sent_by):
                        run = found[server, what]
                        _measure_idle(peer, sender, what, updates, tensors, run)
                        asyncio.run(_measure(peer, sender, what, streams, updates, run))
            with start("upstream", model) as peer, trainer(peer, model) as sender:
                for what in sent_by:
                    _measure_idle(peer, sender, what, updates, tensors, found["upstream", what])
    report = Report(
        "small_tensors",
        ("server", "tensors by", "idle, s", "beside streams, s", "p95, ms", "p95 over without",
         "control's over without", "p95 over control's", "largest over without",
         "rate over without", "CPU a tensor, µs"),
        {"size": size, "streams": streams, "updates": updates, "rounds": rounds},
        notes=[
            f"{tensors:,} tensors. Upstream makes no step from the pause to the continuation.",
            "p95: of the gaps of all updates. without: streams of the same ages, for as long, at "
            f"most {LONG_S:g} s, without an update. control: the same beside a process that copies "
            "as many bytes, evenly spread.",
            "CPU a tensor: of the scheduler's process without the loop's thread, idle, with the "
            "reading of tensors.",
            f"The first update of all took {first[0]:.3g} s, with the search for a plan and its "
            "proof; later servers find the plan in the cache.",
            *(["unpaced: " + ", ".join("=".join(one) for one in UNPACED.items())] * unpaced),
        ],
        facts={"model_bytes": {size: nbytes}, "tensors": tensors},
    )  # fmt: skip
    for (server, what), run in found.items():
        report.add(server=server, way=what, **cells(run))
    for what in sent_by:
        _add_goals(report, what, {server: run for (server, by), run in found.items() if by == what})
    if "disk" in sent_by:
        cpu_us = statistics.median(found["ours", "disk"].cpu_us)
        report.goal("ours, by disk: CPU a tensor, µs, at most 10", cpu_us, at_most=10)
    report.show()
    report.write(json)


def known_ways(names: str) -> list[Small]:
    """Return the ways with these names. Raises ``typer.BadParameter`` for another name."""
    ways: dict[str, Small] = {way: way for way in get_args(Small)}
    try:
        return [ways[name] for name in names.split(",")]
    except KeyError as error:
        raise typer.BadParameter(f"no way is named {error}; there are {', '.join(ways)}") from error


def of_server(server: str, ways: list[Small]) -> list[Small]:
    """Return the ways that are measured. Broadcasts wait for the sender, whatever the pace is."""
    return [way for way in ways if server != "unpaced" or way != "broadcast"]


def cells(run: Found) -> dict[str, Summary | float | None]:
    """Return the cells of a row. Upstream makes no step beside an update."""
    update, still, control = run.update, run.still, run.control
    has_steps = bool(run.update_s)
    return {
        "idle_s": Summary.of(run.idle_s),
        "update_s": Summary.of(run.update_s) if has_steps else None,
        "p95_ms": 1000 * update.p95 if has_steps else None,
        "p95_ratio": update.p95 / still.p95 if has_steps else None,
        "control_ratio": control.p95 / still.p95 if has_steps else None,
        "over_control": update.p95 / control.p95 if has_steps else None,
        "largest_ratio": max(update.gaps) / max(still.gaps) if has_steps else None,
        "rate_ratio": update.rate / still.rate if has_steps else None,
        "cpu_us": Summary.of(run.cpu_us),
    }


def _add_goals(report: Report, way: Small, found: dict[str, Found]) -> None:
    ours = found["ours"]
    blocked = statistics.median(found["upstream"].idle_s)
    over_still = ours.update.p95 / ours.still.p95
    report.goal(f"ours, by {way}: p95 over that without, at most 1.1", over_still, at_most=1.1)
    report.goal(
        f"ours, by {way}: p95 over the control's, at most 1.1",
        ours.update.p95 / ours.control.p95,
        at_most=1.1,
    )
    report.goal(
        f"ours, by {way}: update beside streams over upstream's, which blocks, at most 1",
        statistics.median(ours.update_s) / blocked,
        at_most=1,
    )
    idle_s = statistics.median(ours.idle_s)
    report.goal(
        f"ours, by {way}: idle update over upstream's, at most 1", idle_s / blocked, at_most=1
    )
    if (unpaced := found.get("unpaced")) is not None:
        report.goal(
            f"by {way}: p95 over that without, over unpaced's, below 1",
            over_still * unpaced.still.p95 / unpaced.update.p95,
            at_most=1,
        )
    if report.facts["tensors"] > MANY:
        report.goal(f"ours, by {way}: idle update, s, at most 5", idle_s, at_most=5)


def _measure_idle(
    peer: Peer, sender: Trainer, way: Small, updates: int, tensors: int, run: Found
) -> None:
    """Make updates without requests. The first one of a way counts only if it is long."""
    for number in range(updates + 1):
        before = _cpu_beside_loop(peer)
        seconds = sender.send_small(way).seconds
        if number or seconds > LONG_S:
            run.idle_s.append(seconds)
            run.cpu_us.append(1e6 * (_cpu_beside_loop(peer) - before) / tensors)
        if seconds > LONG_S:
            return


def _cpu_beside_loop(peer: Peer) -> float:
    """Return the processor seconds of the scheduler's threads but the first, which has the loop.

    Threads that have ended count, too.
    """
    (scheduler,) = schedulers(peer.pid)
    spent = scheduler.cpu_times()
    (loop,) = (thread for thread in scheduler.threads() if thread.id == scheduler.pid)
    return float(spent.user + spent.system - loop.user_time - loop.system_time)


async def _measure(
    peer: Peer, sender: Trainer, way: Small, streams: int, updates: int, run: Found
) -> None:
    """Run updates, and after each as long a time without one, and as long beside the control."""
    async with peer.client() as client:
        for _ in range(updates):
            update = asyncio.to_thread(sender.send_small, way)
            seconds = await _run(peer, client, streams, update, run.update)
            run.update_s.append(seconds)
            compared_s = min(seconds, LONG_S)
            await _run(peer, client, streams, asyncio.sleep(compared_s), run.still)
            copies = asyncio.to_thread(sender.copy_memory, compared_s, compared_s / seconds)
            await _run(peer, client, streams, copies, run.control)
            if seconds > LONG_S:
                return


async def _run(
    peer: Peer, client: httpx.AsyncClient, streams: int, what: Coroutine[Any, Any, Any], to: Steps
) -> float:
    """Run ``what`` under fresh streams, add their steps ``to`` others, and return its seconds."""
    async with load(peer, client, streams, prompt_tokens=32, max_tokens=TOKENS) as running:
        await running.wait_for(arrivals=10)
        began = time.perf_counter()
        done = await what
        ended = time.perf_counter()
        if done is not None:
            # what comes before and after is the trainer's: a checkpoint is written and removed
            began, ended = done.sent, done.answered
        await running.wait_for(arrivals=3)
        gaps = [gap for stream in running.streams for gap in stream.gaps_within(began, ended)]
        to.add(gaps, ended - began)
        return ended - began


def _tensors_of(model: Path) -> int:
    with safe_open(model / models.WEIGHTS, framework="pt") as file:
        return len(file.keys())


if __name__ == "__main__":
    typer.run(main)

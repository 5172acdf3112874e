"""Time a commit holds the scheduler's loop, by model size, beside upstream's update.

Ours is ``stall_ms`` of the receipt. Upstream's is the time from its pause to its continue, with the
update in between, during which no request gets a token. Both load the same checkpoint from disk
while streams run. Staging is unpaced: it is not measured here, and a large model on few cores would
take minutes.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import models, options
from benchmarks.common.load import load
from benchmarks.common.peers import Kind, Peer, start
from benchmarks.common.report import Report, Summary
from benchmarks.common.trainer import trainer

PAIR: tuple[Kind, Kind] = ("ours", "upstream")
UNPACED = {"SGLANG_INFLIGHT_PACE_BYTES_PER_S": "0"}


def main(
    sizes: options.Sizes = "135m,500m,1.5b",
    streams: options.Streams = 2,
    updates: Annotated[int, typer.Option(help="each time a server runs")] = 5,
    rounds: options.Rounds = 2,
    json: options.Json = None,
) -> None:
    """Commit time over model size, beside the time that upstream's update blocks."""
    report = Report(
        "commit_size",
        ("model", "MB", "ours: loop held, ms", "upstream: blocked, ms", "upstream, ms/GB", "ratio",
         "step, ms"),
        {"streams": streams, "updates": updates, "rounds": rounds},
        notes=["ratio: upstream's median over ours.", "step: of our server, beside the updates."],
    )  # fmt: skip
    held: dict[str, float] = {}
    names = sizes.split(",")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            model = models.build(Path(folder), name)
            held[name] = _compare(report, name, model, streams, updates, rounds)
    first, last = names[0], names[-1]
    report.goal(f"{first}: commit, ms, below 1", held[first], at_most=1)
    report.goal(f"{last} over {first}: commit, at most 2", held[last] / held[first], at_most=2)
    report.show()
    report.write(json)


def _compare(
    report: Report, name: str, model: Path, streams: int, updates: int, rounds: int
) -> float:
    """Add a row, and return our median."""
    times: dict[Kind, list[float]] = {kind: [] for kind in PAIR}
    steps: dict[Kind, list[float]] = {kind: [] for kind in PAIR}
    for _ in range(rounds):
        for kind in PAIR:
            with start(kind, model, env=UNPACED) as peer:
                found, step_ms = asyncio.run(_measure(peer, model, streams, updates))
            times[kind] += found
            steps[kind].append(step_ms)
    ours, upstream = (Summary.of(times[kind]) for kind in PAIR)
    gigabytes = models.bytes_of(model) / 1e9
    report.add(
        model=name,
        megabytes=1000 * gigabytes,
        ours_ms=ours,
        upstream_ms=upstream,
        upstream_ms_per_gb=upstream.median / gigabytes,
        ratio=upstream.median / ours.median,
        step_ms=Summary.of(steps["ours"]),
    )
    return ours.median


async def _measure(
    peer: Peer, model: Path, streams: int, updates: int
) -> tuple[list[float], float]:
    """Return each update's milliseconds, and a step's. The first update warms up only."""
    found = []
    with trainer(peer, model) as sender:
        async with (
            peer.client() as client,
            load(peer, client, streams, prompt_tokens=32, max_tokens=4096) as running,
        ):
            for _ in range(1 + updates):
                await running.wait_for(arrivals=3)
                update = await asyncio.to_thread(sender.update, "disk")
                found.append(1000 * update.seconds if update.stall_ms is None else update.stall_ms)
            return found[1:], 1000 * running.step_s()


if __name__ == "__main__":
    typer.run(main)

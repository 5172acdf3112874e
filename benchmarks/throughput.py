"""What the patches cost while nothing is paused or updated: tokens/s beside upstream's.

The tiny model's step is almost all scheduler, so it shows the cost of a step in
microseconds; the larger one shows what that is worth in a step of ordinary length.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import models, options
from benchmarks.common.load import generate
from benchmarks.common.peers import Kind, Peer, start
from benchmarks.common.report import Report, Summary

PAIR: tuple[Kind, Kind] = ("ours", "upstream")
PROMPT_TOKENS = 32


def main(
    sizes: options.Sizes = "tiny,135m",
    streams: options.Streams = 8,
    tokens: Annotated[int, typer.Option(help="each request's, in one measurement")] = 256,
    repeats: Annotated[int, typer.Option(help="measurements each time a server runs")] = 4,
    rounds: options.Rounds = 3,
    json: options.Json = None,
) -> None:
    """Tokens/s of the patched and the unpatched server under the same load."""
    report = Report(
        "throughput",
        ("model", "ours, tokens/s", "upstream, tokens/s", "ratio", "ours - upstream, µs/step"),
        {"streams": streams, "tokens": tokens, "repeats": repeats, "rounds": rounds},
        notes=["A ratio is that of two medians, of servers that ran one after the other."],
    )
    for name in sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = models.build(Path(folder), name)
            _compare(report, name, model, streams, tokens, repeats, rounds)
    report.show()
    report.write(json)


def _compare(
    report: Report, name: str, model: Path, streams: int, tokens: int, repeats: int, rounds: int
) -> None:
    seconds: dict[Kind, list[Summary]] = {kind: [] for kind in PAIR}
    for _ in range(rounds):
        for kind in PAIR:
            with start(kind, model) as peer:
                seconds[kind].append(asyncio.run(_measure(peer, streams, tokens, repeats)))
    pairs = list(zip(*(seconds[kind] for kind in PAIR), strict=True))
    ratio = Summary.of(theirs.median / ours.median for ours, theirs in pairs)
    report.add(
        model=name,
        ours=Summary.of(streams * tokens / s.median for s in seconds["ours"]),
        upstream=Summary.of(streams * tokens / s.median for s in seconds["upstream"]),
        ratio=ratio,
        step_us=Summary.of(1e6 * (o.median - t.median) / tokens for o, t in pairs),
    )
    if name != "tiny":
        report.goal(f"{name}: tokens/s over upstream's, at least 0.99", ratio.median, at_least=0.99)


async def _measure(peer: Peer, streams: int, tokens: int, repeats: int) -> Summary:
    """Seconds that all streams together take; the first time warms up and does not count."""
    seconds = []
    async with peer.client() as client:
        for _ in range(1 + repeats):
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for _ in range(streams):
                    group.create_task(
                        generate(peer, client, prompt_tokens=PROMPT_TOKENS, max_tokens=tokens)
                    )
            seconds.append(time.perf_counter() - began)
    return Summary.of(seconds[1:])


if __name__ == "__main__":
    typer.run(main)

"""Cost of the patches without pauses and updates: tokens/s beside upstream's.

The tiny model's step is almost all scheduler, so it shows the cost of a step in microseconds. The
larger model shows the cost's share of an ordinary step.

A machine drifts by more than one per cent a minute. So both servers are up at once and take turns
every few seconds, one stopped by a signal while the other is measured. The result is the median of
the ratios of neighbouring turns.
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
from benchmarks.common.report import Report, Summary, median_interval

PAIR: tuple[Kind, Kind] = ("ours", "upstream")
PROMPT_TOKENS = 32


def main(
    sizes: options.Sizes = "tiny,135m",
    streams: options.Streams = 8,
    tokens: Annotated[int, typer.Option(help="each request's, in one turn")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="of each server, each time it runs")] = 12,
    rounds: options.Rounds = 3,
    json: options.Json = None,
) -> None:
    """Tokens/s of the patched and the unpatched server under the same load."""
    report = Report(
        "throughput",
        ("model", "ours, tokens/s", "upstream, tokens/s", "ratio", "ours - upstream, µs/step"),
        {"streams": streams, "tokens": tokens, "turns": turns, "rounds": rounds},
        notes=[
            "A ratio is that of two neighbouring turns. What follows "
            "is their median with its 95 % interval."
        ],
    )
    for name in sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = models.build(Path(folder), name)
            _compare(report, name, model, streams, tokens, turns, rounds)
    report.show()
    report.write(json)


def _compare(
    report: Report, name: str, model: Path, streams: int, tokens: int, turns: int, rounds: int
) -> None:
    ours: list[float] = []
    theirs: list[float] = []
    for round_ in range(rounds):
        # the first server may get the better memory
        kinds = PAIR if round_ % 2 == 0 else PAIR[::-1]
        with start(kinds[0], model) as first, start(kinds[1], model) as second:
            peers = {peer.kind: peer for peer in (first, second)}
            seconds = asyncio.run(_take_turns(peers, streams, tokens, turns))
        ours += seconds["ours"]
        theirs += seconds["upstream"]
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    ratio = Summary.of(ratios)
    report.add(
        model=name,
        ours=Summary.of(streams * tokens / s for s in ours),
        upstream=Summary.of(streams * tokens / s for s in theirs),
        ratio=ratio,
        step_us=Summary.of(
            1e6 * (our - their) / tokens for our, their in zip(ours, theirs, strict=True)
        ),
    )
    low, high = median_interval(ratios)
    report.notes.append(f"{name}: median ratio {ratio.median:.4f}, {low:.4f} to {high:.4f}")
    least = 0.995 if name == "tiny" else 0.99
    report.goal(f"{name}: tokens/s over upstream's, at least {least}", ratio.median, at_least=least)


async def _take_turns(
    peers: dict[Kind, Peer], streams: int, tokens: int, turns: int
) -> dict[Kind, list[float]]:
    """Return the seconds of all streams together, by server. The first turns only warm up."""
    seconds: dict[Kind, list[float]] = {kind: [] for kind in PAIR}
    for peer in peers.values():
        peer.halt()
    for turn in range(1 + turns):
        # A B, B A, A B: neither server is always second
        for kind in PAIR if turn % 2 == 0 else PAIR[::-1]:
            with peers[kind].going():
                took = await _measure(peers[kind], streams, tokens)
            if turn > 0:
                seconds[kind].append(took)
    return seconds


async def _measure(peer: Peer, streams: int, tokens: int) -> float:
    async with peer.client() as client:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(
                    generate(peer, client, prompt_tokens=PROMPT_TOKENS, max_tokens=tokens)
                )
        return time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)

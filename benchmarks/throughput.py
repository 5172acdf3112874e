"""Cost of the patches without pauses and updates: tokens/s beside upstream's.

The tiny model's step is almost all scheduler, so it shows the cost of a step in microseconds. The
larger model shows the cost's share of an ordinary step.

A machine drifts by more than one per cent a minute. So all servers are up at once and take turns
every few seconds, the others stopped by a signal while one is measured. The result is the median of
the ratios of neighbouring turns. A second unpatched server is the control: two servers that are
alike differ by as much as the machine's noise.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import models, options
from benchmarks.common.load import generate
from benchmarks.common.peers import Kind, Peer, start
from benchmarks.common.report import Report, Summary, median_interval

SERVERS: dict[str, Kind] = {"ours": "ours", "upstream": "upstream", "control": "upstream"}
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
        (
            "model",
            "ours, tokens/s",
            "upstream, tokens/s",
            "ratio",
            "control's ratio",
            "ours - upstream, µs/step",
        ),
        {"streams": streams, "tokens": tokens, "turns": turns, "rounds": rounds},
        notes=[
            "A ratio is that of two neighbouring turns. The next lines "
            "give the median of all turns with its 95 % interval."
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
    seconds: dict[str, list[float]] = {server: [] for server in SERVERS}
    for round_ in range(rounds):
        # the first server may get the better memory
        order = [*SERVERS][round_ % len(SERVERS) :] + [*SERVERS][: round_ % len(SERVERS)]
        with contextlib.ExitStack() as stack:
            peers = {server: stack.enter_context(start(SERVERS[server], model)) for server in order}
            for server, took in asyncio.run(_take_turns(peers, streams, tokens, turns)).items():
                seconds[server] += took
    ours, control = seconds["ours"], seconds["control"]
    theirs = [statistics.mean(both) for both in zip(seconds["upstream"], control, strict=True)]
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    alike = [one / other for one, other in zip(seconds["upstream"], control, strict=True)]
    ratio = Summary.of(ratios)
    report.add(
        model=name,
        ours=Summary.of(streams * tokens / s for s in ours),
        upstream=Summary.of(streams * tokens / s for s in theirs),
        ratio=ratio,
        control=Summary.of(alike),
        step_us=Summary.of(
            1e6 * (our - their) / tokens for our, their in zip(ours, theirs, strict=True)
        ),
    )
    for what, found in (("median ratio", ratios), ("the control's", alike)):
        low, high = median_interval(found)
        median = Summary.of(found).median
        report.notes.append(f"{name}: {what} {median:.4f}, {low:.4f} to {high:.4f}")
    least = 0.995 if name == "tiny" else 0.99
    report.goal(f"{name}: tokens/s over upstream's, at least {least}", ratio.median, at_least=least)


async def _take_turns(
    peers: dict[str, Peer], streams: int, tokens: int, turns: int
) -> dict[str, list[float]]:
    """Return the seconds of all streams together, by server. The first turns only warm up."""
    seconds: dict[str, list[float]] = {server: [] for server in peers}
    for peer in peers.values():
        peer.halt()
    for turn in range(1 + turns):
        # no server is always first, and each is before and after each other as often
        at = turn // 2 % len(peers)
        order = [*peers][at:] + [*peers][:at]
        for server in order if turn % 2 == 0 else order[::-1]:
            with peers[server].going():
                took = await _measure(peers[server], streams, tokens)
            if turn > 0:
                seconds[server].append(took)
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

"""Time to the next token after a trainer dies by SIGKILL, in each phase of its update.

The trainer broadcasts over a link of 100 MB/s. ``begun``: no byte was sent. ``sending``: a
broadcast is on its way. ``staged``: everything was sent, and the end of the update was not asked
for. ``committed``: the end was answered. Upstream's trainer has paused generation by then, and
nobody else continues it: its streams are watched for a while only.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import httpx
import typer

from benchmarks.common import models, options
from benchmarks.common.load import Load, load
from benchmarks.common.peers import Kind, Peer, start
from benchmarks.common.report import Report, Summary
from benchmarks.common.trainer import Phase, trainer
from benchmarks.update_gap import LINK_BYTES_PER_S

PAIR: tuple[Kind, Kind] = ("ours", "upstream")
POLL_S = 0.02


@dataclass(frozen=True)
class Death:
    """``next_s`` is the time from the kill until every stream has a token: None if one has none."""

    next_s: float | None
    step_ms: float


def main(
    size: options.Size = "135m",
    streams: options.Streams = 4,
    watch: Annotated[float, typer.Option(help="seconds after which silence is enough")] = 20,
    phases: Annotated[str, typer.Option(help="with commas between")] = ",".join(get_args(Phase)),
    rounds: options.Rounds = 3,
    json: options.Json = None,
) -> None:
    """Silence of running streams after the death of a trainer amid an update."""
    report = Report(
        "trainer_death",
        ("server", "killed when", "next token, ms", "silent for good", "over a step", "step, ms"),
        {"size": size, "streams": streams, "watch": watch, "rounds": rounds},
        notes=[
            "next token: from the kill until each stream has a token.",
            f"silent for good: in how many of the deaths a stream had none for {watch:g} s.",
        ],
    )
    chosen = [phase for phase in get_args(Phase) if phase in phases.split(",")]
    deaths: dict[tuple[Kind, Phase], list[Death]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        model = models.build(Path(folder), size)
        for _ in range(rounds):
            for phase in chosen:
                # a server that was left in a pause is of no use for the next phase
                for kind in PAIR:
                    with start(kind, model) as peer:
                        deaths[kind, phase].append(
                            asyncio.run(_die(peer, model, phase, streams, watch))
                        )
    for (kind, phase), found in deaths.items():
        _add_row(report, kind, phase, found, watch)
    for phase in chosen:
        found = deaths["ours", phase]
        worst = max(death.next_s or watch for death in found)
        step_ms = Summary.of(death.step_ms for death in found).median
        report.goal(
            f"ours, {phase}: next token, in steps, at most 3", 1000 * worst / step_ms, at_most=3
        )
    report.show()
    report.write(json)


def _add_row(report: Report, kind: Kind, phase: Phase, deaths: list[Death], watch: float) -> None:
    came = [1000 * death.next_s for death in deaths if death.next_s is not None]
    step = Summary.of(death.step_ms for death in deaths)
    next_ms = Summary.of(came) if came else None
    report.add(
        server=kind,
        phase=phase,
        next_ms=next_ms or f"more than {1000 * watch:g}",
        silent=f"{len(deaths) - len(came)} of {len(deaths)}",
        steps=next_ms and next_ms.median / step.median,
        step_ms=step,
    )


async def _die(peer: Peer, model: Path, phase: Phase, streams: int, watch: float) -> Death:
    with trainer(peer, model, bytes_per_s=LINK_BYTES_PER_S) as sender:
        async with peer.client() as client:
            # a first update makes the shadow
            await asyncio.to_thread(sender.update, "distributed")
            try:
                async with load(
                    peer, client, streams, prompt_tokens=32, max_tokens=4096
                ) as running:
                    await running.wait_for(arrivals=20)
                    step_ms = 1000 * running.step_s()
                    await asyncio.to_thread(sender.update_until, "distributed", phase)
                    # arrivals are noted meanwhile
                    killed = await asyncio.to_thread(sender.kill)
                    return Death(await _next_token(running, killed, watch), step_ms)
            except* httpx.HTTPError as broken:
                raise RuntimeError(f"{peer.kind}, {phase}: a stream broke") from broken


async def _next_token(running: Load, killed: float, watch: float) -> float | None:
    """Return the seconds from ``killed`` until each stream has had a token since."""
    deadline = asyncio.get_running_loop().time() + watch
    while asyncio.get_running_loop().time() < deadline:
        firsts = [
            next((a.at for a in stream.arrivals if a.at > killed), None)
            for stream in running.streams
        ]
        known = [at for at in firsts if at is not None]
        if len(known) == len(firsts):
            return max(known) - killed
        await asyncio.sleep(POLL_S)
    return None


if __name__ == "__main__":
    typer.run(main)

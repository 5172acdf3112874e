"""One update, recorded: when each stream's tokens arrive before it, during it, and after it.

The README shows its picture. The other benchmarks measure many updates, and say how typical
this one is.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from benchmarks.common import models, options
from benchmarks.common.load import Load, load
from benchmarks.common.peers import NO_VLLM, Kind, Peer, every_kind, has_vllm, start
from benchmarks.common.report import Report
from benchmarks.common.trainer import Trainer, Transport, Update, trainer
from benchmarks.update_gap import LINK_BYTES_PER_S, ways_of

TRANSPORTS: list[Transport] = [what for what in get_args(Transport) if what != "tensor"]


def main(
    size: options.Size = "smollm2",
    streams: options.Streams = 4,
    quiet: Annotated[float, typer.Option(help="seconds recorded before and after")] = 6,
    way: options.Way = None,
    json: options.Json = None,
) -> None:
    """Arrivals of tokens around one update, on every server."""
    report = Report(
        "timeline",
        ("server", "update", "update, s", "longest silence, ms", "tokens/s before", "during",
         "after", "step, ms"),
        {"size": size, "streams": streams, "quiet": quiet},
        notes=[
            "silence: the longest time within which no stream has a token.",
            "distributed: the trainer's link is held to 100 MB/s.",
            "vllm: pause, reload from disk, resume.",
        ],
        facts={"records": []},
    )  # fmt: skip
    if not has_vllm():
        report.notes.append(NO_VLLM)
    with tempfile.TemporaryDirectory() as folder:
        model = models.build(Path(folder), size)
        report.facts["model_bytes"] = {size: models.bytes_of(model)}
        for kind in every_kind():
            with (
                start(kind, model) as peer,
                trainer(peer, model, bytes_per_s=LINK_BYTES_PER_S) as sender,
            ):
                for what in ways_of(kind, [way] if way else TRANSPORTS):
                    asyncio.run(_record(report, peer, sender, what, streams, quiet))
    report.show()
    report.write(json)


async def _record(
    report: Report, peer: Peer, sender: Trainer, what: Transport, streams: int, quiet: float
) -> None:
    await asyncio.to_thread(sender.update, what)  # joins groups, makes the shadow
    async with (
        peer.client() as client,
        load(peer, client, streams, prompt_tokens=32, max_tokens=4096) as running,
    ):
        await running.wait_for(arrivals=10)
        await asyncio.sleep(quiet)
        update = await asyncio.to_thread(sender.update, what)
        await running.wait_for(arrivals=3)
        await asyncio.sleep(quiet)
    _add(report, peer.kind, what, running, update, quiet)


def _add(
    report: Report, kind: Kind, what: Transport, running: Load, update: Update, quiet: float
) -> None:
    began, ended = update.sent, update.answered

    def rate(start: float, end: float) -> float:
        return running.tokens(start, end) / (end - start)

    report.add(
        server=kind,
        update=what,
        update_s=update.seconds,
        silence_ms=1000 * longest_silence(running, began, ended),
        before=rate(began - quiet, began),
        during=rate(began, ended),
        after=rate(ended, ended + quiet),
        step_ms=1000 * running.step_s(end=began),
    )
    report.facts["records"].append(
        {
            "server": kind,
            "update": what,
            "seconds": round(update.seconds, 3),
            "arrivals": [
                arrivals_around(stream.arrivals, began, ended, quiet) for stream in running.streams
            ],
        }
    )


def arrivals_around(
    arrivals: list[Any], began: float, ended: float, quiet: float
) -> list[tuple[float, int]]:
    """Return one stream's arrivals around an update: seconds from its begin, and tokens."""
    near = (a for a in arrivals if began - quiet <= a.at <= ended + quiet)
    return [(round(a.at - began, 3), a.tokens) for a in near]


def longest_silence(running: Load, began: float, ended: float) -> float:
    """Return the longest time without a token of any stream that touches a window, in seconds."""
    times = sorted(a.at for stream in running.streams for a in stream.arrivals)
    pairs = itertools.pairwise(times)
    return max((b - a for a, b in pairs if b >= began and a <= ended), default=0.0)


if __name__ == "__main__":
    typer.run(main)

"""Memory and time of an update by the share of elements that it changes.

Updates go back and forth between two checkpoints, of which a share of the elements differ.
``changes`` and ``device`` are our forms of staging. Upstream pauses, loads, and goes on. The
commit's time and upstream's block are measured as in ``commit_size``, while streams run and staging
is unpaced.

Memory is the most that an update took above the scheduler's level before its first update, in
copies of the weights. The receipt counts changes and windows. The process's own memory also has
what the source needs, above all the largest tensor of the checkpoint.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from benchmarks.common import models, options
from benchmarks.common.load import generate, load
from benchmarks.common.memory import Memory, watched
from benchmarks.common.peers import Kind, Peer, start
from benchmarks.common.report import Report, Summary
from benchmarks.common.trainer import Trainer, Update, trainer
from harness.server import schedulers

Server = Literal["changes", "device", "upstream"]
Way = Literal["disk", "patch"]

KINDS: dict[Server, Kind] = {"changes": "ours", "device": "ours", "upstream": "upstream"}
PERCENTS = "0.1,1,3,10,100"
# a larger patch nears the bytes of the weights
LARGEST_PATCH = 10.0
GOAL_PERCENT = 1.0
GOAL_COPIES = 0.08
# the streams' KV stays in memory that is touched before the first update
POOL_TOKENS = 1024
MAX_TOKENS = 256
POLL_S = 0.01


@dataclass(frozen=True)
class Case:
    way: Way
    percent: float


@dataclass(frozen=True)
class Sample:
    """One update. ``held_ms`` is upstream's block. Upstream has no receipt, and zeros for it."""

    held_ms: float
    step_ms: float
    staged_s: float
    receipt_copies: float
    own_copies: float


Samples = dict[tuple[Case, Server], list[Sample]]


def main(
    sizes: options.Sizes = "135m,500m,1.5b",
    changed: Annotated[str, typer.Option(help="percents, with commas between")] = PERCENTS,
    streams: options.Streams = 2,
    updates: Annotated[int, typer.Option(min=1, help="there and back, of each kind")] = 2,
    rounds: options.Rounds = 2,
    json: options.Json = None,
) -> None:
    """Memory, commit and staging by the share of changed elements, beside upstream's update."""
    percents = [float(percent) for percent in changed.split(",")]
    report = Report(
        "changes",
        (
            "model",
            "update",
            "changed, %",
            "server",
            "memory, receipt",
            "memory, own",
            "held, ms",
            "over upstream's",
            "staged, s",
            "over device's",
            "step, ms",
        ),
        {"changed": changed, "streams": streams, "updates": updates, "rounds": rounds},
        notes=[
            "held: the loop by our commit; the streams by upstream's whole update from disk.",
            "memory: the most of all updates, in copies of the weights.",
        ],
    )
    for size in sizes.split(","):
        samples: Samples = defaultdict(list)
        with tempfile.TemporaryDirectory() as folder:
            model = models.build(Path(folder), size)
            report.facts.setdefault("model_bytes", {})[size] = models.bytes_of(model)
            for _ in range(rounds):
                for server in get_args(Server):
                    _run(server, model, percents, streams, updates, samples)
        for case in _cases(percents):
            _add_rows(report, size, case, samples)
    report.show()
    report.write(json)


def _cases(percents: Sequence[float]) -> Iterator[Case]:
    for percent in percents:
        yield Case("disk", percent)
        if percent <= LARGEST_PATCH:
            yield Case("patch", percent)


def _add_rows(report: Report, size: str, case: Case, samples: Samples) -> None:
    blocked = Summary.of(s.held_ms for s in samples[Case("disk", case.percent), "upstream"])
    device_staged = Summary.of(s.staged_s for s in samples[case, "device"])
    for server in get_args(Server):
        found = samples[case, server]
        if not found:
            continue
        held = Summary.of(s.held_ms for s in found)
        staged = Summary.of(s.staged_s for s in found) if KINDS[server] == "ours" else None
        by_receipt = max(s.receipt_copies for s in found)
        own = max(s.own_copies for s in found)
        report.add(
            model=size,
            update=case.way,
            percent=case.percent,
            server=server,
            receipt_copies=by_receipt if server == "changes" else None,
            own_copies=own,
            held_ms=held,
            held_over_upstream=held.median / blocked.median,
            staged_s=staged,
            staged_over_device=staged and staged.median / device_staged.median,
            step_ms=Summary.of(s.step_ms for s in found),
        )
        if server == "changes" and case.percent == GOAL_PERCENT:
            name = f"{size}, {case.way}, {case.percent:g} %"
            report.goal(
                f"{name}: copies by the receipt, at most {GOAL_COPIES}",
                by_receipt,
                at_most=GOAL_COPIES,
            )
            report.goal(
                f"{name}: copies in own memory, at most {GOAL_COPIES}", own, at_most=GOAL_COPIES
            )
            report.goal(
                f"{name}: loop held over upstream's block, below 1",
                held.median / blocked.median,
                at_most=1,
            )


def _run(
    server: Server,
    model: Path,
    percents: Sequence[float],
    streams: int,
    updates: int,
    samples: Samples,
) -> None:
    env = {"SGLANG_INFLIGHT_PACE_BYTES_PER_S": "0", "SGLANG_INFLIGHT_STAGING": server}
    with (
        tempfile.TemporaryDirectory() as folder,
        start(
            KINDS[server],
            model,
            flags=("--max-total-tokens", str(POOL_TOKENS)),
            env=env if KINDS[server] == "ours" else {},
        ) as peer,
        trainer(peer, model) as sender,
    ):
        run = _Run(peer, sender, model, Path(folder))
        for case, sample in asyncio.run(run.measure(percents, streams, updates)):
            samples[case, server].append(sample)


@dataclass
class _Run:
    """One server from start to end."""

    peer: Peer
    sender: Trainer
    model: Path
    folder: Path

    async def measure(
        self, percents: Sequence[float], streams: int, updates: int
    ) -> list[tuple[Case, Sample]]:
        (scheduler,) = schedulers(self.peer.pid)
        memory = Memory(scheduler)
        changed = self.model
        found: list[tuple[Case, Sample]] = []
        async with self.peer.client() as client:
            tokens = POOL_TOKENS - MAX_TOKENS
            await generate(self.peer, client, prompt_tokens=tokens, max_tokens=1)
            async with (
                load(
                    self.peer, client, streams, prompt_tokens=32, max_tokens=MAX_TOKENS
                ) as running,
                watched(memory, POLL_S),
            ):
                await running.wait_for(arrivals=3)
                memory.begin()
                # the first update warms up and does not count
                await asyncio.to_thread(self.sender.load_checkpoint, self.model)
                for case in _cases(percents):
                    if case.way == "patch" and self.peer.kind == "upstream":
                        continue
                    if case.way == "disk":
                        changed = await asyncio.to_thread(
                            models.build_changed, self.model, self.folder, case.percent / 100
                        )
                    there_and_back = (self.model, changed), (changed, self.model)
                    for served, to in there_and_back * updates:
                        await running.wait_for(arrivals=3)
                        memory.forget_peak()
                        update = await asyncio.to_thread(self._send, case.way, served, to)
                        step_ms = 1000 * running.step_s(end=update.sent)
                        found.append((case, self._sample(update, memory, step_ms)))
        return found

    def _send(self, way: Way, served: Path, checkpoint: Path) -> Update:
        if way == "disk":
            return self.sender.load_checkpoint(checkpoint)
        return self.sender.patch(served, checkpoint)

    def _sample(self, update: Update, memory: Memory, step_ms: float) -> Sample:
        weights = models.bytes_of(self.model)
        staged_as = update.receipt.get("staged_as") or {}
        memory.look()
        return Sample(
            held_ms=1000 * update.seconds if update.stall_ms is None else update.stall_ms,
            step_ms=step_ms,
            staged_s=update.receipt.get("staged_s", 0.0),
            receipt_copies=staged_as.get("staging_bytes_peak", 0) / weights,
            own_copies=(memory.own - memory.first_own) / weights,
        )


if __name__ == "__main__":
    typer.run(main)

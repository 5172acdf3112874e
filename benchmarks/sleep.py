"""Time to release and resume memory, per GB, and the time to the first token afterwards.

A cycle is that of a trainer on the same device: release all, resume the weights, send new ones over
a process group, resume the rest, continue. Upstream releases only without requests, so its clients
ask again after the wake, for as many tokens: ``idle``. Ours does that too, and in ``frozen`` keeps
the requests. ``kept`` is idle with a copy of the weights and no update. Bytes are the drop of the
scheduler's resident memory.

On a CPU upstream's release frees nothing, and ends the server by waiting for CUDA. Here both use
the reference platform's memory saver, which returns pages to the system. A small plugin shows it
upstream's memory and lets upstream's release end (``benchmarks/pages``). vLLM has no sleep on a
CPU.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import psutil
import typer

from benchmarks.common import models, options
from benchmarks.common.load import load, prompt, read_stream
from benchmarks.common.peers import Kind, Peer, start
from benchmarks.common.report import Report, Summary
from benchmarks.common.trainer import Trainer, trainer
from harness.server import schedulers

Way = Literal["idle", "frozen", "kept"]

WAYS: dict[Kind, tuple[Way, ...]] = {"ours": ("idle", "frozen", "kept"), "upstream": ("idle",)}
PAGES = Path(__file__).with_name("pages")
FLAGS = ("--enable-memory-saver",)
# tokens of a stream before a cycle begins
TOKENS = 4
GB = 1e9


@dataclass(frozen=True)
class Cycle:
    released: int  # bytes
    release_s: float
    resume_s: float
    # time from the trainer's last byte until each stream has a token
    wake_s: float | None

    @property
    def release_s_per_gb(self) -> float:
        return self.release_s * GB / self.released

    @property
    def resume_s_per_gb(self) -> float:
        return self.resume_s * GB / self.released


def main(
    size: options.Size = "135m",
    streams: options.Streams = 4,
    prompt_tokens: Annotated[int, typer.Option(help="of each stream")] = 512,
    cycles: Annotated[int, typer.Option(help="of each kind and start, after one to warm up")] = 4,
    rounds: options.Rounds = 2,
    json: options.Json = None,
) -> None:
    """Release, resume, and the first token after the trainer's last byte."""
    report = Report(
        "sleep",
        (
            "server", "requests", "MB released", "release, s", "release, s/GB", "resume, s",
            "resume, s/GB", "last byte to tokens, s",
        ),
        {
            "size": size, "streams": streams, "prompt_tokens": prompt_tokens, "cycles": cycles,
            "rounds": rounds,
        },
        notes=[
            "idle: asked again after the wake. frozen: the same requests go on. kept: idle, with "
            "a copy of the weights in a file, and no update.",
            "vLLM was left out: its sleep needs a GPU.",
        ],
    )  # fmt: skip
    found: dict[tuple[Kind, Way], list[Cycle]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        model = models.build(Path(folder), size)
        for _ in range(rounds):
            for kind, ways in WAYS.items():
                with (
                    start(kind, model, flags=FLAGS, plugins=PAGES) as peer,
                    trainer(peer, model) as sender,
                ):
                    run = _Run(peer, sender, streams, prompt_tokens)
                    for way, measured in asyncio.run(run.measure(ways, cycles)).items():
                        found[kind, way] += measured
    for (kind, way), measured in found.items():
        wakes = [cycle.wake_s for cycle in measured if cycle.wake_s is not None]
        report.add(
            server=kind,
            requests=way,
            released=Summary.of(cycle.released / 1e6 for cycle in measured),
            release=Summary.of(cycle.release_s for cycle in measured),
            release_per_gb=Summary.of(cycle.release_s_per_gb for cycle in measured),
            resume=Summary.of(cycle.resume_s for cycle in measured),
            resume_per_gb=Summary.of(cycle.resume_s_per_gb for cycle in measured),
            wake=Summary.of(wakes) if wakes else None,
        )
    _add_goals(report, found)
    report.show()
    report.write(json)


def _add_goals(report: Report, found: dict[tuple[Kind, Way], list[Cycle]]) -> None:
    def ratio(way: Way, of: Callable[[Cycle], float]) -> float:
        ours, theirs = found["ours", way], found["upstream", "idle"]
        return Summary.of(map(of, ours)).median / Summary.of(map(of, theirs)).median

    for way in ("idle", "frozen"):
        for what, of in (
            ("release, s/GB", lambda cycle: cycle.release_s_per_gb),
            ("resume, s/GB", lambda cycle: cycle.resume_s_per_gb),
            ("last byte to tokens", lambda cycle: cycle.wake_s),
        ):
            report.goal(f"{way}: {what}, over upstream's", ratio(way, of), at_most=1.25)


@dataclass
class _Run:
    """One server from start to end."""

    peer: Peer
    sender: Trainer
    streams: int
    prompt_tokens: int

    async def measure(self, ways: tuple[Way, ...], cycles: int) -> dict[Way, list[Cycle]]:
        (scheduler,) = schedulers(self.peer.pid)
        do: dict[Way, Callable[..., Awaitable[Cycle]]] = {
            "idle": self._idle, "frozen": self._frozen, "kept": self._kept
        }  # fmt: skip
        async with self.peer.client() as client:
            return {
                way: [await do[way](client, scheduler) for _ in range(1 + cycles)][1:]
                for way in ways
            }

    # ---- cycles ----------------------------------------------------------------------

    async def _idle(self, client: httpx.AsyncClient, scheduler: psutil.Process) -> Cycle:
        await self._ask(client)
        await self._until_idle(client)
        released, release_s = await self._release(client, scheduler)
        resume_s, last_byte = await self._resume_and_send(client)
        came = await self._ask(client)
        return Cycle(released, release_s, resume_s, came - last_byte)

    async def _frozen(self, client: httpx.AsyncClient, scheduler: psutil.Process) -> Cycle:
        async with load(
            self.peer, client, self.streams, prompt_tokens=self.prompt_tokens, max_tokens=1024
        ) as running:
            await running.wait_for(arrivals=TOKENS)
            await _post(client, "/pause_generation", mode="retract")
            released, release_s = await self._release(client, scheduler, keep_weights="discard")
            resume_s, last_byte = await self._resume_and_send(client)
            await _post(client, "/continue_generation")
            await running.wait_for(arrivals=1)
            firsts = [
                next(arrival.at for arrival in stream.arrivals if arrival.at > last_byte)
                for stream in running.streams
            ]
        return Cycle(released, release_s, resume_s, max(firsts) - last_byte)

    async def _kept(self, client: httpx.AsyncClient, scheduler: psutil.Process) -> Cycle:
        await self._ask(client)
        await self._until_idle(client)
        released, release_s = await self._release(client, scheduler, keep_weights="host")
        return Cycle(released, release_s, await _timed(_post(client, RESUME)), None)

    # ---- steps -----------------------------------------------------------------------

    async def _ask(self, client: httpx.AsyncClient) -> float:
        """Send requests with new prompts, and return the time when all had their first token."""

        async def first_of_one() -> float:
            asked = prompt(self.prompt_tokens)
            return min([at async for at, _ in read_stream(self.peer, client, asked, TOKENS)])

        return max(await asyncio.gather(*(first_of_one() for _ in range(self.streams))))

    async def _release(
        self, client: httpx.AsyncClient, scheduler: psutil.Process, **fields: Any
    ) -> tuple[int, float]:
        """Release memory, and return the bytes and seconds."""
        before = scheduler.memory_info().rss
        seconds = await _timed(_post(client, RELEASE, **fields))
        return before - scheduler.memory_info().rss, seconds

    async def _until_idle(self, client: httpx.AsyncClient) -> None:
        """Wait until no step runs: upstream's release ends a server amid an answer's last step.

        Upstream's flush is refused until then.
        """
        async with asyncio.timeout(60):
            while (await client.post("/flush_cache")).status_code != 200:
                await asyncio.sleep(0.05)

    async def _resume_and_send(self, client: httpx.AsyncClient) -> tuple[float, float]:
        """Resume and update. Return the seconds of both resumes, and the time of the last byte."""
        seconds = await _timed(_post(client, RESUME, tags=["weights"]))
        update = await asyncio.to_thread(self.sender.update, "distributed")
        seconds += await _timed(_post(client, RESUME, tags=["kv_cache", "cuda_graph"]))
        return seconds, update.last_byte


RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


async def _post(client: httpx.AsyncClient, path: str, **body: Any) -> None:
    (await client.post(path, json=body)).raise_for_status()


async def _timed(action: Awaitable[None]) -> float:
    began = time.perf_counter()
    await action
    return time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)

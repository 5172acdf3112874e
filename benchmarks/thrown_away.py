"""Tokens that an update throws away, by the way in which it treats running requests.

Each client wants a number of tokens for its prompt. It asks again, from the start, if its answer
ends too early. Halfway through, one update comes from disk. ``made again`` are tokens beyond those
that the clients wanted. ``computed again`` are tokens of prefills beyond the prompts: those of
requests that were sent again or retracted.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import httpx
import typer

from benchmarks.common import models, options
from benchmarks.common.load import prompt, read_stream
from benchmarks.common.peers import NO_VLLM, Kind, Peer, every_kind, has_vllm, start
from benchmarks.common.report import Report, Summary
from benchmarks.common.trainer import Trainer, trainer

IN_FLIGHT = "in flight"
# None is an update without a mode: in flight
MODES: dict[Kind, tuple[str | None, ...]] = {
    "ours": (None, "recompute", "in_place", "retract", "abort"),
    "upstream": ("in_place", "retract", "abort"),
    "vllm": ("keep", "abort"),
}
POLL_S = 0.005


@dataclass
class Client:
    """One client: the tokens that it has got, all in all and of its current request."""

    made: int = 0
    has: int = 0


@dataclass(frozen=True)
class Waste:
    made_again: int
    computed_again: int
    seconds: float  # from the update until every client has its tokens


@dataclass
class Run:
    """One server from start to end."""

    peer: Peer
    sender: Trainer
    streams: int
    prompt_tokens: int
    wanted: int
    prompts: list[list[int]] = field(init=False)

    async def measure(self, mode: str | None) -> Waste:
        # absent from every cache
        self.prompts = [prompt(self.prompt_tokens) for _ in range(self.streams)]
        async with self.peer.client() as client:
            computed_before = await _prefilled(self.peer, client)
            clients = [Client() for _ in self.prompts]
            async with asyncio.TaskGroup() as group:
                for one, asked in zip(clients, self.prompts, strict=True):
                    group.create_task(self._ask(client, one, asked))
                while any(one.has < self.wanted // 2 for one in clients):
                    await asyncio.sleep(POLL_S)
                began = asyncio.get_running_loop().time()
                await asyncio.to_thread(self.sender.update, "disk", mode)
            seconds = asyncio.get_running_loop().time() - began
            computed = await _prefilled(self.peer, client) - computed_before
        return Waste(
            made_again=sum(one.made for one in clients) - self.streams * self.wanted,
            computed_again=computed - self.streams * self.prompt_tokens,
            seconds=seconds,
        )

    async def _ask(self, client: httpx.AsyncClient, one: Client, asked: list[int]) -> None:
        while one.has < self.wanted:
            one.has = 0
            async for _, tokens in read_stream(self.peer, client, asked, self.wanted):
                one.made += tokens
                one.has += tokens


def main(
    size: options.Size = "135m",
    streams: options.Streams = 8,
    prompt_tokens: Annotated[int, typer.Option(help="of each client")] = 64,
    wanted: Annotated[int, typer.Option(help="tokens of each client")] = 128,
    updates: Annotated[int, typer.Option(min=1, help="of each mode and start")] = 3,
    rounds: options.Rounds = 2,
    json: options.Json = None,
) -> None:
    """Tokens made and computed again for one update, in each mode of each server."""
    report = Report(
        "thrown_away",
        ("server", "running requests", "made again", "computed again", "of those wanted, %",
         "until all have theirs, s"),
        {
            "size": size, "streams": streams, "prompt_tokens": prompt_tokens, "wanted": wanted,
            "updates": updates, "rounds": rounds,
        },
        notes=[
            "made again: tokens generated beyond those wanted. computed again: tokens of prefills "
            "beyond the prompts.",
            "in flight: the update makes no pause. recompute: no pause, and the commit retracts "
            "running requests. The other names are the modes of the server's pause.",
        ],
    )  # fmt: skip
    if not has_vllm():
        report.notes.append(NO_VLLM)
    found: dict[tuple[Kind, str | None], list[Waste]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        model = models.build(Path(folder), size)
        for _ in range(rounds):
            for kind in every_kind():
                with start(kind, model) as peer, trainer(peer, model) as sender:
                    sender.update("disk")  # makes the shadow
                    run = Run(peer, sender, streams, prompt_tokens, wanted)
                    for _ in range(updates):
                        for mode in MODES[kind]:
                            found[kind, mode].append(asyncio.run(run.measure(mode)))
    for (kind, mode), wastes in found.items():
        made = Summary.of(waste.made_again for waste in wastes)
        report.add(
            server=kind,
            mode=mode or IN_FLIGHT,
            made_again=made,
            computed_again=Summary.of(waste.computed_again for waste in wastes),
            percent=100 * made.median / (streams * wanted),
            seconds=Summary.of(waste.seconds for waste in wastes),
        )
    ours = found["ours", None]
    report.goal(
        "ours, in flight: tokens made again, at most 0",
        max(waste.made_again for waste in ours),
        at_most=0,
    )
    report.goal(
        "ours, in flight: tokens computed again, at most 0",
        max(waste.computed_again for waste in ours),
        at_most=0,
    )
    report.show()
    report.write(json)


async def _prefilled(peer: Peer, client: httpx.AsyncClient) -> int:
    """Return the tokens of all prefills of a server since its start."""
    if peer.kind == "vllm":
        text = (await client.get("/metrics")).raise_for_status().text
        found = re.findall(r"^vllm:prompt_tokens_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
        return round(sum(map(float, found)))
    # a server writes the line after the step, and an answer may be faster
    await asyncio.sleep(0.5)
    return prefilled_by(peer.log.read_text(errors="replace"))


def prefilled_by(log: str) -> int:
    """Return the tokens of all prefills that SGLang's log tells of."""
    return sum(map(int, re.findall(r"Prefill batch.*?#new-token: (\d+)", log)))


if __name__ == "__main__":
    typer.run(main)

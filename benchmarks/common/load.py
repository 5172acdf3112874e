"""Streams of tokens, with each token's arrival time."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx

from benchmarks.common.models import FIRST_WORD, SHAPES
from benchmarks.common.peers import Peer
from harness.streams import read_event

SILENCE_S = 120.0  # an error for a stream silent for so long


class Arrival(NamedTuple):
    at: float  # time.perf_counter()
    tokens: int  # number of tokens in this arrival
    request: int  # number of the request within the stream


class Gap(NamedTuple):
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Stream:
    """One client, which repeats its request after each whole answer."""

    arrivals: list[Arrival] = field(default_factory=list)

    def gaps(self) -> list[Gap]:
        """Return the gaps between neighbouring tokens of one request."""
        pairs = itertools.pairwise(self.arrivals)
        return [Gap(a.at, b.at) for a, b in pairs if a.request == b.request]

    def largest_gap(self, start: float, end: float) -> float:
        """Return the largest gap overlapping a window, in seconds."""
        touching = (g.seconds for g in self.gaps() if g.end >= start and g.start <= end)
        return max(touching, default=0.0)

    def seconds_per_token(self, start: float, end: float) -> float:
        """Return the average between a window's first and last arrival."""
        first, *others = (a for a in self.arrivals if start <= a.at <= end)
        return (others[-1].at - first.at) / sum(a.tokens for a in others)

    def gaps_within(self, start: float, end: float) -> list[float]:
        """Return the gaps lying entirely in a window, in seconds."""
        return [g.seconds for g in self.gaps() if g.start >= start and g.end <= end]


class Load:
    """Several running streams."""

    def __init__(self, count: int) -> None:
        self.streams = [Stream() for _ in range(count)]
        self._arrived = asyncio.Event()

    def note(self, stream: Stream, arrival: Arrival) -> None:
        stream.arrivals.append(arrival)
        self._arrived.set()

    async def wait_for(self, arrivals: int) -> None:
        """Wait until each stream has had ``arrivals`` more arrivals."""
        goals = [len(stream.arrivals) + arrivals for stream in self.streams]
        async with asyncio.timeout(SILENCE_S):
            while any(len(s.arrivals) < goal for s, goal in zip(self.streams, goals, strict=True)):
                self._arrived.clear()
                await self._arrived.wait()

    def last_arrival(self) -> float:
        return max((s.arrivals[-1].at for s in self.streams if s.arrivals), default=0.0)

    def step_s(self, start: float = float("-inf"), end: float = float("inf")) -> float:
        """Return the median gap of all streams in a window, which is a step's time."""
        gaps = (stream.gaps_within(start, end) for stream in self.streams)
        return statistics.median(itertools.chain.from_iterable(gaps))

    def tokens(self, start: float, end: float) -> int:
        return sum(a.tokens for s in self.streams for a in s.arrivals if start <= a.at < end)


@asynccontextmanager
async def load(
    peer: Peer, client: httpx.AsyncClient, streams: int, *, prompt_tokens: int, max_tokens: int
) -> AsyncIterator[Load]:
    """Keep ``streams`` requests running. At the end the client leaves and the server drops them."""
    running = Load(streams)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_ask_again(peer, client, running, s, prompt_tokens, max_tokens))
            for s in running.streams
        ]
        try:
            yield running
        finally:
            for task in tasks:
                task.cancel()


async def _ask_again(
    peer: Peer,
    client: httpx.AsyncClient,
    running: Load,
    stream: Stream,
    prompt_tokens: int,
    max_tokens: int,
) -> None:
    for request in itertools.count():
        async for at, tokens in read_stream(peer, client, prompt(prompt_tokens), max_tokens):
            running.note(stream, Arrival(at, tokens, request))


async def read_stream(
    peer: Peer, client: httpx.AsyncClient, prompt: list[int], max_tokens: int
) -> AsyncIterator[tuple[float, int]]:
    """Yield times and numbers of new tokens. Tokens of one read count as simultaneous."""
    had, rest = 0, ""
    body = peer.body(prompt, max_tokens, stream=True)
    async with client.stream("POST", peer.stream_path, json=body) as response:
        response.raise_for_status()
        async for text in response.aiter_text():
            at = time.perf_counter()
            *lines, rest = (rest + text).split("\n")
            has = max((_tokens(peer, line) for line in lines), default=0)
            if has > had:
                yield at, has - had
                had = has


def _tokens(peer: Peer, line: str) -> int:
    """Return the request's number of tokens by this line of server-sent events."""
    chunk = read_event(line)
    return 0 if chunk is None else peer.tokens_so_far(chunk)


async def generate(
    peer: Peer, client: httpx.AsyncClient, *, prompt_tokens: int, max_tokens: int
) -> None:
    """Make a request without streaming, whose client uses no CPU meanwhile."""
    body = peer.body(prompt(prompt_tokens), max_tokens, stream=False)
    (await client.post(peer.stream_path, json=body)).raise_for_status()


def prompt(tokens: int) -> list[int]:
    """Return a prompt absent from every cache."""
    vocab = min(shape.vocab for shape in SHAPES.values())
    return [random.randrange(FIRST_WORD, vocab) for _ in range(tokens)]

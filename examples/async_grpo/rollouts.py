"""Answers of the server, asked for on a thread, in groups of one question each."""

from __future__ import annotations

import asyncio
import json
import queue
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from examples.async_grpo import task
from examples.async_grpo.grpo import Sample
from sglang_inflight.client import version_per_token

MAX_TOKENS = task.LONGEST + 2
# tokens in a chunk of a stream: each chunk takes the time of two processes
STREAM_INTERVAL = 16
# the chunks of one slow request come in shorter intervals than this
STANDSTILL_S = 0.4
# the server closes a connection that is idle for 5 s, perhaps while a request is on its way
KEPT_S = 2.0
Group = list[Sample]


@dataclass
class Tokens:
    """Counts of tokens that the server made, and the times at which they came."""

    made: int = 0
    # tokens of answers that a pause ended
    thrown_away: int = 0
    # tokens of answers that the server ended, because their first token was too old
    outdated: int = 0
    arrivals: list[float] = field(default_factory=list)


class Rollouts:
    """Asks questions, ``group_size`` times each, with at most ``running`` groups at a time.

    A thread with an event loop makes all requests, and writes ``tokens``. A group is begun for
    each one that ``allow`` allows. Another thread takes finished groups with ``take``. A failed
    request ends the thread, and ``take`` raises its error.
    """

    def __init__(
        self,
        url: str,
        *,
        seed: int,
        running: int,
        group_size: int,
        max_version_lag: int,
        turns: int = 1,
        kept: int = 0,
    ) -> None:
        """``turns``: questions of a conversation. Each turn makes a group of its own.

        ``kept``: how many answers are recorded and kept, picked at random.
        """
        self.tokens = Tokens()
        self._url = url
        self._rng = random.Random(seed)
        self._running, self._group_size, self._turns = running, group_size, turns
        self._sampling = {
            "temperature": 1.0,
            "max_new_tokens": MAX_TOKENS,
            "custom_params": {
                "max_version_lag": max_version_lag,
                **({"record": "replay"} if kept else {}),
            },
        }
        # files of ``sglang-inflight replay``, one for each answer
        self.kept: list[dict[str, Any]] = []
        self._most_kept, self._ended = kept, 0
        self._pick = random.Random(seed)
        self._finished: queue.Queue[Group | BaseException] = queue.Queue()
        self._loop = asyncio.new_event_loop()
        self._allowed = asyncio.Semaphore(0)

    @contextmanager
    def going(self) -> Iterator[None]:
        """Ask during the block. At its end the connections of running requests are closed."""
        thread = threading.Thread(target=self._run, name="rollouts")
        self._asking = self._loop.create_task(self._ask_all())
        thread.start()
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._asking.cancel)
            thread.join()
            self._loop.close()

    def allow(self, groups: int) -> None:
        """Let so many further groups begin."""

        def release() -> None:
            for _ in range(groups):
                self._allowed.release()

        self._loop.call_soon_threadsafe(release)

    def take(self, timeout_s: float) -> Group | None:
        """Return a finished group, or None if none finishes in ``timeout_s``."""
        try:
            group = self._finished.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(group, BaseException):
            raise group
        return group

    # ---- on the loop -----------------------------------------------------------------

    def _run(self) -> None:
        self._loop.run_until_complete(asyncio.wait([self._asking]))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())

    async def _ask_all(self) -> None:
        limits = httpx.Limits(max_connections=None, keepalive_expiry=KEPT_S)
        try:
            async with (
                httpx.AsyncClient(base_url=self._url, timeout=None, limits=limits) as client,
                asyncio.TaskGroup() as workers,
            ):
                for _ in range(self._running):
                    workers.create_task(self._ask_on(client))
        except* Exception as failures:
            self._finished.put(failures)

    async def _ask_on(self, client: httpx.AsyncClient) -> None:
        while True:
            histories: list[list[int]] = [[] for _ in range(self._group_size)]
            for _ in range(self._turns):
                await self._allowed.acquire()
                question = task.ask(self._rng)
                prompts = [history + question.prompt for history in histories]
                found: dict[int, Sample] = {}
                # the loop asks as often as the server ends answers early
                while missing := [place for place in range(len(prompts)) if place not in found]:
                    asked = [prompts[place] for place in missing]
                    answers = await self._ask(client, question, asked)
                    found |= {missing[index]: sample for index, sample in answers.items()}
                group = [found[place] for place in range(len(prompts))]
                histories = [sample.prompt + sample.answer for sample in group]
                self._finished.put(group)

    async def _ask(
        self, client: httpx.AsyncClient, question: task.Question, prompts: list[list[int]]
    ) -> dict[int, Sample]:
        """Ask a question after each history. Return the answers that have ended, by their place."""
        body = {
            "input_ids": prompts,
            "sampling_params": self._sampling,
            "return_logprob": True,
            "stream": True,
        }
        partial = [_Partial() for _ in prompts]
        async with client.stream("POST", "/generate", json=body) as response:
            response.raise_for_status()
            async for chunk in _events(response):
                made = partial[chunk["index"]].extend(chunk)
                if made:
                    self.tokens.made += made
                    self.tokens.arrivals.append(time.monotonic())
        samples = {}
        for place, (prompt, answer) in enumerate(zip(prompts, partial, strict=True)):
            reason = answer.meta["finish_reason"]
            if reason["type"] != "abort":
                samples[place] = answer.as_sample(question, prompt)
                self._keep(answer, prompt)
            elif "max_version_lag" in (reason.get("message") or ""):
                self.tokens.outdated += len(answer.tokens)
            else:
                self.tokens.thrown_away += len(answer.tokens)
        return samples

    def _keep(self, answer: _Partial, prompt: list[int]) -> None:
        """Keep each answer with the same probability, however many will come."""
        self._ended += 1
        place = len(self.kept)
        if place == self._most_kept:
            place = self._pick.randrange(self._ended)
        if place < self._most_kept:
            self.kept[place : place + 1] = [answer.as_recorded(prompt)]


@dataclass
class _Partial:
    """An answer of which some chunks have come."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    def extend(self, chunk: Mapping[str, Any]) -> int:
        """Take in a chunk, and return how many tokens it has."""
        self.meta = chunk["meta_info"]
        self.tokens += chunk["output_ids"]
        # an answer that ends in the queue has none
        self.logprobs += [entry[0] for entry in self.meta.get("output_token_logprobs") or ()]
        return len(chunk["output_ids"])

    def as_recorded(self, prompt: list[int]) -> dict[str, Any]:
        logprobs = [[logprob] for logprob in self.logprobs]
        return {
            "request": {"input_ids": prompt},
            "answer": {
                "output_ids": self.tokens,
                "meta_info": {**self.meta, "output_token_logprobs": logprobs},
            },
        }

    def as_sample(self, question: task.Question, prompt: list[int]) -> Sample:
        versions = [int(version) for version in version_per_token(self.meta)]
        if not len(self.tokens) == len(self.logprobs) == len(versions):
            raise RuntimeError(
                f"an answer has {len(self.tokens)} tokens, {len(self.logprobs)} log-probabilities "
                f"and {len(versions)} versions"
            )
        reward = task.reward(question, self.tokens)
        return Sample(prompt, self.tokens, self.logprobs, versions, reward)


async def _events(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"the server refused a question: {event['error']}")
            yield event


def standstills(
    arrivals: list[float], start: float, end: float, longest: float = STANDSTILL_S
) -> list[tuple[float, float]]:
    """Return begin and end, in seconds since ``start``, of each gap longer than ``longest``.

    ``arrivals`` are ascending times of tokens. Gaps before the first and after the last one count.
    """
    return [
        (earlier - start, later - start)
        for earlier, later in pairwise([start, *arrivals, end])
        if later - earlier > longest
    ]

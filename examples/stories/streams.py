"""Stream stories token by token over ``/generate``, as a client does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from sglang_inflight.client import Span, read_spans


@dataclass
class Story:
    """A story. ``arrivals`` are the chunks' times (``time.monotonic``)."""

    title: str
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    # of a recorded story
    logprobs: list[list[Any]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    is_recorded: bool = False
    arrivals: list[float] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    error: str | None = None

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def take(self, chunk: dict[str, Any]) -> None:
        """Take a chunk, which holds the tokens since the one before."""
        if "error" in chunk:
            self.error = str(chunk["error"])
            return
        meta = chunk["meta_info"]
        so_far = meta["completion_tokens"]
        self.ids += chunk["output_ids"]
        if len(self.ids) != so_far:
            self.error = f"{len(self.ids)} tokens have come, and the server counts {so_far}"
            return
        self.spans = read_spans(meta) or self.spans
        self.logprobs += meta.get("output_token_logprobs") or ()
        self.meta = meta
        self.finish_reason = meta.get("finish_reason")
        self.arrivals.append(time.monotonic())


class Streams:
    """Stories of ``tokens`` tokens each, and a place to wait for their progress."""

    def __init__(self, stories: Sequence[Story], tokens: int) -> None:
        self.stories = list(stories)
        self.tokens = tokens
        self._news = asyncio.Condition()

    @property
    def slowest(self) -> int:
        return min(len(story.ids) for story in self.stories)

    async def reach(self, tokens: int) -> None:
        """Wait until every story has ``tokens`` tokens, or one of them has ended."""
        async with self._news:
            await self._news.wait_for(
                lambda: self.slowest >= tokens or any(story.ended for story in self.stories)
            )

    async def run(self, client: httpx.AsyncClient, sampling: dict[str, Any]) -> None:
        await asyncio.gather(*(self._stream(client, story, sampling) for story in self.stories))

    async def _stream(
        self, client: httpx.AsyncClient, story: Story, sampling: dict[str, Any]
    ) -> None:
        body = {"input_ids": story.prompt_ids, "sampling_params": sampling, "stream": True}
        if story.is_recorded:
            recorded = {**sampling, "custom_params": {"record": "replay"}}
            body |= {"sampling_params": recorded, "return_logprob": True}
        try:
            async with client.stream("POST", "/generate", json=body) as response:
                if response.is_error:
                    story.error = (await response.aread()).decode(errors="replace")
                async for chunk in _events(response):
                    story.take(chunk)
                    await self._tell()
        except httpx.HTTPError as error:
            story.error = f"{type(error).__name__}: {error}"
        if not story.ended:
            story.error = "the stream ended without a finish reason"
        await self._tell()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    if response.is_error:
        return
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))

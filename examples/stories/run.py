"""Run the demo from its checkpoints to its checks, and end every process it started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console

from examples.stories.again import check_again
from examples.stories.checks import Check, check_all
from examples.stories.corpus import with_chat_template
from examples.stories.gaps import median_gap
from examples.stories.models import Models, make_models
from examples.stories.pacing import Pacing
from examples.stories.prompts import PROMPTS
from examples.stories.screen import LiveScreen, live_screen
from examples.stories.server import start_server
from examples.stories.streams import Story, Streams
from examples.stories.styles import HEADLINE, VERSE
from examples.stories.trainer_process import TrainerProcess, start_trainer
from examples.stories.updates import update_by_patch, update_from_disk, update_from_tensors
from examples.stories.updating import Update, UpdateResult, sampling, update_while_streaming
from examples.stories.weights import checkpoint_bytes
from sglang_inflight.client import AsyncClient
from sglang_inflight_tools import cpu

BASE_VERSION = "v1"
TRAINERS_VERSION = "v4"
MODEL_NAME = "smollm2"

REHEARSAL_TOKENS = 24
# the model's context is 8192, and the demo's CPU server holds 16384 tokens of KV
LONGEST_ON_CPU = 3800
LONGEST_ON_CUDA = 6000


@dataclass(frozen=True)
class Outcome:
    stories: list[Story]
    tokens: int
    results: list[UpdateResult]
    checks: list[Check]
    decode: Callable[[list[int]], str]


async def run(console: Console, cache: Path, *, tokens: int | None, logs: Path) -> Outcome:
    """``tokens`` is the length of each story; None chooses it by this machine's speed."""
    with live_screen(console) as screen:
        async with make_models(cache, logs / "build.log", screen.show_built) as models:
            await models.ready["base"]
            loading = asyncio.create_task(asyncio.to_thread(_load_tokenizer, models.base))
            async with start_server(
                models.base,
                name=MODEL_NAME,
                version=BASE_VERSION,
                log=logs / "server.log",
                # a chunk has its own tokens alone
                more=("--incremental-streaming-output",),
                # the last check makes a story again
                env={"SGLANG_INFLIGHT_REPLAY": "1"},
            ) as server:
                screen.say(f"the server serves {BASE_VERSION}{_on_this_cpu()}")
                async with start_trainer(
                    server.url, models.headline, TRAINERS_VERSION, logs / "trainer.log"
                ) as trainer:
                    return await _update_and_check(
                        server.url, trainer, models, await loading, tokens=tokens, screen=screen
                    )


async def _update_and_check(
    url: str,
    trainer: TrainerProcess,
    models: Models,
    tokenizer: Any,
    *,
    tokens: int | None,
    screen: LiveScreen,
) -> Outcome:
    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids)
        return text

    def bound(tokens: int) -> dict[str, Any]:
        return sampling(tokens, tokenizer.all_special_ids)

    titles = [(prompt, _encode(tokenizer, prompt)) for prompt in PROMPTS]
    screen.expect_stories(decode, update_bytes=checkpoint_bytes(models.base))
    async with httpx.AsyncClient(base_url=url, timeout=600) as http, AsyncClient(url) as client:
        if tokens is None:
            rehearsal = Streams([Story(*title) for title in titles], REHEARSAL_TOKENS)
            await rehearsal.run(http, bound(REHEARSAL_TOKENS))
            step_s = median_gap(story.arrivals for story in rehearsal.stories)
            longest = LONGEST_ON_CUDA if torch.cuda.is_available() else LONGEST_ON_CPU
            pacing = Pacing.at(step_s, longest)
        else:
            pacing = Pacing.over(tokens)
        recorded, *others = [Story(*title) for title in titles]
        recorded.is_recorded = True
        streams = Streams([recorded, *others], pacing.tokens)
        results = await update_while_streaming(
            http,
            client,
            streams,
            _plan_updates(client, trainer, models),
            reading=pacing.reading,
            sampling=bound(pacing.tokens),
            screen=screen,
        )
        screen.say(f"{recorded.title!r} is told again, with the commits between the same tokens")
        checkpoints = {BASE_VERSION: models.base}
        checkpoints |= {result.update.version: result.update.checkpoint for result in results}
        again = await asyncio.to_thread(check_again, url, recorded, checkpoints)
    checks = check_all(
        streams.stories, results, base_version=BASE_VERSION, tokens=pacing.tokens, decode=decode
    )
    checks.append(again)
    return Outcome(streams.stories, pacing.tokens, results, checks, decode)


def _plan_updates(client: AsyncClient, trainer: TrainerProcess, models: Models) -> Sequence[Update]:
    headline, verse, ready = models.headline, models.verse, models.ready
    return (
        Update(
            "from disk",
            "v2",
            headline,
            HEADLINE,
            ready[HEADLINE.name],
            lambda: update_from_disk(client, headline, "v2"),
        ),
        Update(
            "from tensors",
            "v3",
            verse,
            VERSE,
            ready[VERSE.name],
            lambda: update_from_tensors(client, verse, "v3"),
        ),
        Update(
            "from a trainer",
            TRAINERS_VERSION,
            headline,
            HEADLINE,
            asyncio.ensure_future(trainer.join()),
            trainer.send,
        ),
        Update(
            "as a patch",
            "v5",
            verse,
            VERSE,
            ready[VERSE.name],
            lambda: update_by_patch(client, headline, verse, "v5", served_version=TRAINERS_VERSION),
            patches=headline,
        ),
    )


def _on_this_cpu() -> str:
    if torch.accelerator.is_available():
        return ""
    dtype, why = cpu.fast_dtype()
    return f", in {dtype}: {why}"


def _load_tokenizer(checkpoint: Path) -> Any:
    # the import takes seconds, and the server starts meanwhile
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


def _encode(tokenizer: Any, prompt: str) -> list[int]:
    templated = with_chat_template(tokenizer, prompt)
    ids: list[int] = tokenizer(templated, add_special_tokens=False)["input_ids"]
    return ids

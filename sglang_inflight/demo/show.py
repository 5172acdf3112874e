"""From checkpoints to a verdict: server and trainer are started, and ended in every case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from transformers import AutoTokenizer

from sglang_inflight.demo.corpus import with_chat_template
from sglang_inflight.demo.models import Models
from sglang_inflight.demo.play import Act, Pacing, Performance, play, sampling
from sglang_inflight.demo.prompts import PROMPTS
from sglang_inflight.demo.screen import live_screen
from sglang_inflight.demo.server import start_server
from sglang_inflight.demo.stories import Shelf, Story
from sglang_inflight.demo.styles import HEADLINE, VERSE
from sglang_inflight.demo.trainer_process import TrainerProcess, start_trainer
from sglang_inflight.demo.updates import update_from_disk, update_from_tensors
from sglang_inflight.demo.verdict import Check, judge
from sglang_inflight.demo.weights import checkpoint_bytes

BASE_VERSION = "v1"
LAST_VERSION = "v4"
MODEL_NAME = "smollm2"


@dataclass(frozen=True)
class Outcome:
    stories: list[Story]
    performances: list[Performance]
    checks: list[Check]
    decode: Callable[[list[int]], str]


async def put_on(console: Console, models: Models, *, tokens: int, logs: Path) -> Outcome:
    tokenizer = AutoTokenizer.from_pretrained(models.base)
    shelf = Shelf([Story(prompt, _encode(tokenizer, prompt)) for prompt in PROMPTS])

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids)
        return text

    with console.status("The server starts") as status:
        async with start_server(
            models.base, name=MODEL_NAME, version=BASE_VERSION, log=logs / "server.log"
        ) as server:
            status.update("The trainer joins it")
            async with (
                start_trainer(
                    server.url, models.headline, LAST_VERSION, logs / "trainer.log"
                ) as trainer,
                httpx.AsyncClient(base_url=server.url, timeout=600) as client,
            ):
                await trainer.join()
                status.stop()
                with live_screen(
                    console,
                    len(shelf.stories),
                    tokens,
                    update_bytes=checkpoint_bytes(models.base),
                    decode=decode,
                ) as screen:
                    performances = await play(
                        client,
                        shelf,
                        _acts(client, trainer, models),
                        pacing=Pacing.over(tokens),
                        sampling=sampling(tokens, tokenizer.all_special_ids),
                        screen=screen,
                    )
    checks = judge(
        shelf.stories, performances, base_version=BASE_VERSION, tokens=tokens, decode=decode
    )
    return Outcome(shelf.stories, performances, checks, decode)


def _acts(client: httpx.AsyncClient, trainer: TrainerProcess, models: Models) -> Sequence[Act]:
    headline, verse = models.headline, models.verse
    return (
        Act(
            "from disk", "v2", headline, HEADLINE, lambda: update_from_disk(client, headline, "v2")
        ),
        Act("from tensors", "v3", verse, VERSE, lambda: update_from_tensors(client, verse, "v3")),
        Act("from a trainer", LAST_VERSION, headline, HEADLINE, trainer.update),
    )


def _encode(tokenizer: Any, prompt: str) -> list[int]:
    templated = with_chat_template(tokenizer, prompt)
    ids: list[int] = tokenizer(templated, add_special_tokens=False)["input_ids"]
    return ids

"""Training stories, which the base model writes itself.

Its own words teach a style without moving anything else: on them it has nothing to learn
but the style.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sglang_inflight.demo.prompts import TRAINING_PROMPTS

TOKENS = 128
SEED = 0


class Story(NamedTuple):
    """``prompt`` has the chat template around it."""

    prompt: str
    text: str


def with_chat_template(tokenizer: Any, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    templated: str = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    return templated


@torch.no_grad()
def write_stories(model: Any, tokenizer: Any) -> list[Story]:
    prompts = [with_chat_template(tokenizer, prompt) for prompt in TRAINING_PROMPTS]
    tokenizer.padding_side = "left"
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        written = model.generate(
            **batch,
            min_new_tokens=TOKENS,
            max_new_tokens=TOKENS,
            do_sample=True,
            temperature=0.7,
            top_p=0.95,
        )
    texts = tokenizer.batch_decode(
        written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return [Story(*pair) for pair in zip(prompts, texts, strict=True)]

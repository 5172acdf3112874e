"""Training stories, which the base model wrote itself, once: ``corpus.json``.

Its own words teach a style without moving anything else: on them it has nothing to learn
but the style. None of them is about what the demo asks for.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any, NamedTuple


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


def read_stories(tokenizer: Any) -> list[Story]:
    written = files(__package__).joinpath("corpus.json").read_text(encoding="utf-8")
    return [
        Story(with_chat_template(tokenizer, prompt), text) for prompt, text in json.loads(written)
    ]

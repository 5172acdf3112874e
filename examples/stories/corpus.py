"""Training stories, written once by the base model: ``corpus.json``.

The model's own words teach it the style and nothing else. No story has the demo's subjects.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any, NamedTuple


class Story(NamedTuple):
    """A story. ``prompt`` includes the chat template."""

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

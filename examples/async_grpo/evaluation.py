"""The reward that a model is to expect, computed without sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from examples.async_grpo import task
from examples.async_grpo.grpo import Sample, answer_logprobs
from examples.async_grpo.model import of_like_length

PARTS = 8


@torch.no_grad()
def expected_reward(model: Any, questions: Sequence[task.Question]) -> float:
    """Return the mean reward of answers sampled at temperature 1, exactly.

    A question has one right answer, so its expected reward is that answer's probability.
    """
    total = 0.0
    for part in of_like_length(questions, parts=PARTS, length=lambda asked: len(asked.answer)):
        right = [Sample(asked.prompt, asked.answer, [], [], 1.0) for asked in part]
        lengths = [len(sample.answer) for sample in right]
        for logprobs in answer_logprobs(model, right).split(lengths):
            total += float(logprobs.sum().exp())
    return total / len(questions)

"""GRPO on samples whose tokens come from several versions.

Each token has the log-probability by the weights that sampled it, as the server returned it. Its
importance ratio is the new probability over that one, whichever version that was. So a sample that
spans three versions needs no special case, and no old weights are kept.

The loss is the clipped one of PPO (arXiv 1707.06347), with GRPO's advantages (arXiv 2402.03300)
and DAPO's mean over tokens, clipped higher above than below (arXiv 2503.14476).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from examples.async_grpo.model import of_like_length, pad

CLIP_BELOW, CLIP_ABOVE = 0.2, 0.28
LARGEST_NORM = 1.0
# batches of like length need less padding
PARTS = 4


@dataclass(frozen=True)
class Sample:
    """An answer. ``logprobs`` and ``versions`` have an entry for each token of ``answer``.

    A version is the count of steps that its weights had been trained for.
    """

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    versions: list[int]
    reward: float


class Step(NamedTuple):
    """``ratio_off`` is the mean distance of a ratio from one; ``clipped`` a share of the tokens."""

    loss: float
    ratio_off: float
    clipped: float


class Mismatch(NamedTuple):
    """Distances of the trainer's log-probabilities from the server's: a count, and their sum."""

    tokens: int
    nats: float

    def __add__(self, other: Any) -> Mismatch:
        return Mismatch(self.tokens + other.tokens, self.nats + other.nats)


NO_TOKENS = Mismatch(0, 0.0)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[Sample]],
    *,
    version: int,
) -> tuple[Step, dict[int, Mismatch]]:
    """Make one step of ``optimizer`` by groups of answers, each group to one question.

    ``model`` has been trained for ``version`` steps. Return the mismatch by how many versions a
    token is behind, too.
    """
    weighted = [
        (sample, advantage)
        for group in groups
        for sample, advantage in zip(
            group, advantages([sample.reward for sample in group]), strict=True
        )
    ]
    tokens = sum(len(sample.answer) for sample, _ in weighted)
    total, ratio_off, clipped = 0.0, 0.0, 0
    mismatch: dict[int, Mismatch] = {}
    optimizer.zero_grad()
    for part in of_like_length(weighted, parts=PARTS, length=lambda row: len(row[0].answer)):
        samples = [sample for sample, _ in part]
        new = answer_logprobs(model, samples)
        # in the order of ``new``: row by row
        old = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
        advantage = torch.tensor([value for sample, value in part for _ in sample.answer])
        ratio = (new - old).exp()
        bounded = ratio.clamp(1 - CLIP_BELOW, 1 + CLIP_ABOVE)
        loss = -torch.minimum(ratio * advantage, bounded * advantage).sum() / tokens
        loss.backward()
        total += loss.item()
        ratio_off += (ratio.detach() - 1).abs().sum().item()
        clipped += int((ratio != bounded).sum())
        ages = [version - made_by for sample in samples for made_by in sample.versions]
        for age, nats in zip(ages, (new.detach() - old).abs().tolist(), strict=True):
            mismatch[age] = mismatch.get(age, NO_TOKENS) + Mismatch(1, nats)
    torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
    optimizer.step()
    return Step(total, ratio_off / tokens, clipped / tokens), mismatch


def advantages(rewards: Sequence[float]) -> list[float]:
    """Return each reward's distance from the group's mean, in standard deviations."""
    values = torch.tensor(rewards, dtype=torch.float32)
    # equal rewards say nothing
    spread = values.std(correction=0)
    normal: list[float] = ((values - values.mean()) / (spread + 1e-4)).tolist()
    return normal


def answer_logprobs(model: Any, samples: Sequence[Sample]) -> torch.Tensor:
    """Return the log-probability of each answer's tokens, flat, row by row."""
    ids, is_answer = pad([(sample.prompt, sample.answer) for sample in samples])
    logits = model(input_ids=ids).logits[:, :-1].float()
    of_ids = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return of_ids[is_answer[:, 1:]]


def count_ages(groups: Sequence[Sequence[Sample]], step: int) -> Counter[int]:
    """Return how many tokens are how many versions behind ``step``."""
    return Counter(
        step - version for group in groups for sample in group for version in sample.versions
    )


def oldest_version(group: Sequence[Sample]) -> int:
    return min(version for sample in group for version in sample.versions)

"""Compare the log-probabilities of served tokens with the trainer's model of the named version.

A wrong version in an answer would spoil each importance ratio, and no loss would show it. So after
a run the trainer repeats the server's forwards, with the weights that it sent under each name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from examples.async_grpo.grpo import Sample
from examples.async_grpo.model import Weights, with_weights

# server and trainer compute in float32, in another order
TOLERANCE = 1e-3
MOST_SAMPLES = 64


@dataclass(frozen=True)
class LabelCheck:
    """``largest`` is the largest difference of a log-probability from its version's own.

    ``mislabelled`` counts the tokens that differ by more than ``TOLERANCE``. ``noticeable`` counts
    those that would, if every label named a neighbouring version.
    """

    tokens: int
    largest: float
    mislabelled: int
    noticeable: int


def check_labels(
    model: Any,
    samples: Sequence[Sample],
    versions: Mapping[int, Weights],
    *,
    recomputes: bool,
) -> LabelCheck:
    """Check the samples that span the most versions. ``model`` is in float32, and is changed."""
    chosen = sorted(samples, key=lambda sample: -len(set(sample.versions)))[:MOST_SAMPLES]
    off: list[float] = []
    off_by_one: list[float] = []
    for sample in chosen:
        served = torch.tensor(sample.logprobs)
        for differences, labels in (
            (off, sample.versions),
            (off_by_one, [_neighbour(version, versions) for version in sample.versions]),
        ):
            own = repeat_forwards(model, sample, labels, versions, recomputes=recomputes)
            differences += (own - served).abs().tolist()
    return LabelCheck(
        len(off),
        max(off, default=0.0),
        sum(difference > TOLERANCE for difference in off),
        sum(difference > TOLERANCE for difference in off_by_one),
    )


@dataclass(frozen=True)
class KVCost:
    """The cost of old KV: distances of log-probabilities from those with KV of the tokens' weights.

    ``mean`` and ``p99`` are of the distance. ``ratio_variance`` is the variance of the importance
    ratio that a trainer without off-policy data would see: 0 if all KV were fresh.
    """

    tokens: int
    mean: float
    p99: float
    ratio_variance: float


def measure_kv_cost(
    model: Any, samples: Sequence[Sample], versions: Mapping[int, Weights], *, most: int
) -> KVCost:
    """Compute ``most`` answers, evenly spread over the run, again with fresh KV.

    ``model`` is in float32, and is changed.
    """
    stride = max(1, len(samples) // most)
    parts = []
    for sample in samples[::stride]:
        fresh = repeat_forwards(model, sample, sample.versions, versions, recomputes=True)
        parts.append(fresh - torch.tensor(sample.logprobs))
    off = torch.cat(parts) if parts else torch.zeros(1)
    return KVCost(
        tokens=len(off),
        mean=float(off.abs().mean()),
        p99=float(off.abs().quantile(0.99)),
        ratio_variance=float(off.exp().var(correction=0)),
    )


@torch.no_grad()
def repeat_forwards(
    model: Any,
    sample: Sample,
    labels: Sequence[int],
    versions: Mapping[int, Weights],
    *,
    recomputes: bool,
) -> torch.Tensor:
    """Return the log-probability of each token of an answer, by the weights that it is labelled by.

    The KV of earlier positions is that of their own forwards. With ``recomputes`` it is computed
    anew at each change of the version.
    """
    ids = torch.tensor([sample.prompt + sample.answer])
    prompt = len(sample.prompt)
    found: list[torch.Tensor] = []
    cache: Any = None
    done = start = 0
    for version, tokens in groupby(labels):
        end = start + len(list(tokens))
        with_weights(model, versions[version])
        if recomputes:
            cache, done = None, 0
        # the forward of the last position but one samples the last token
        inputs = ids[:, done : prompt + end - 1]
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache, done = output.past_key_values, prompt + end - 1
        logprobs = output.logits[0, start - end :].log_softmax(-1)
        targets = ids[0, prompt + start : prompt + end]
        found.append(logprobs.gather(-1, targets[:, None])[:, 0])
        start = end
    return torch.cat(found)


def _neighbour(version: int, versions: Mapping[int, Weights]) -> int:
    return version - 1 if version - 1 in versions else version + 1

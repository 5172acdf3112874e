"""TRL's requests to the OpenAI routes, and TRL's way to read the answers.

From TRL 1.16: ``generation/vllm_client.py`` (GRPO, RLOO and others with ``vllm_mode="server"``),
``experimental/async_grpo/async_rollout_worker.py``, and
``experimental/async_distillation/async_rollout_worker.py``. The values are TRL's defaults, except
for lengths.
"""

from __future__ import annotations

import math
import random
from typing import Any

Body = dict[str, Any]

# seeds of a worker without one
SEED_BITS = 63


def generation(model: str, prompts: list[list[int]], *, n: int = 1, **sampling: Any) -> Body:
    """Return the body of ``VLLMClient.generate``."""
    return {
        "model": model,
        "prompt": prompts,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "n": n,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 16,
        "logprobs": 0,
        **sampling,
    }


def chat(model: str, text: str, *, n: int = 1, **sampling: Any) -> Body:
    """Return the body of ``VLLMClient.chat``."""
    return {
        "model": model,
        "n": n,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 16,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "messages": [{"role": "user", "content": text}],
        **sampling,
    }


def rollout(model: str, prompt: list[int], **sampling: Any) -> Body:
    """Return the body of AsyncGRPO's rollout worker."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": 16,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "n": 1,
        "return_token_ids": True,
        "logprobs": 0,
        "seed": random.getrandbits(SEED_BITS),
        **sampling,
    }


def scoring(model: str, sequences: list[int] | list[list[int]], **more: Any) -> Body:
    """Return the body of AsyncDistillation's worker, with one sequence, and of
    ``VLLMClient.get_sequence_logprobs``, with several.
    """
    return {
        "model": model,
        "prompt": sequences,
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 100,
        **more,
    }


def read_rollout(answer: Body) -> tuple[list[int], list[float]]:
    """Return a turn's tokens and their log-probabilities."""
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def read_scores(choice: Body, sequence: list[int], since: int) -> list[tuple[list[int], float]]:
    """Return each position's tokens, likeliest first, and its own token's log-probability.

    The positions are those from ``since`` on, after the prompt that a student was given.
    """
    positions = choice["prompt_logprobs"]
    assert len(positions) == len(sequence)
    scores: list[tuple[list[int], float]] = []
    for token, position in zip(sequence[since:], positions[since:], strict=True):
        in_order = sorted(position.items(), key=lambda item: item[1]["rank"])
        scores.append(([int(name) for name, _ in in_order], position[str(token)]["logprob"]))
    return scores


def read_logprobs(logprobs: Body) -> tuple[list[list[float]], list[list[int]]]:
    """Return one choice's log-probabilities and token ids by position, likeliest first.

    Every position has at least its own token, and every token is named by its id.
    """
    if "content" in logprobs:
        positions = [
            (
                entry["token"],
                entry["logprob"],
                {t["token"]: t["logprob"] for t in entry["top_logprobs"]},
            )
            for entry in logprobs["content"]
        ]
    else:
        columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
        positions = list(zip(*columns, strict=True))
    values: list[list[float]] = []
    ids: list[list[int]] = []
    for token, logprob, likely in positions:
        all_of_it = {token: logprob, **(likely or {})}
        in_order = sorted(all_of_it, key=lambda name: -all_of_it[name])
        ids.append([int(name.removeprefix("token_id:")) for name in in_order])
        values.append([all_of_it[name] for name in in_order])
        assert all(math.isfinite(value) for value in values[-1])
    return values, ids

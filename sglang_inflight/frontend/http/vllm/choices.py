"""Convert SGLang's outputs to vLLM's form, for ``/inference/v1/generate``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from sglang_inflight.messages import ADAPTER_VERSIONS

# vLLM's floor: JSON has no infinity
LOWEST = -9999.0

# value, token, and the token's text, not requested here
Logprob = tuple[float | None, int, str | None]


def describe_choice(
    index: int, tokens: Sequence[int], meta: dict[str, Any], logprobs: int | None, *, since: int = 0
) -> dict[str, Any]:
    """Return vLLM's choice for ``tokens``, beginning at the output's ``since``-th.

    ``weight_versions``, and with an adapter ``adapter_versions``, span the whole output so far.
    """
    reason = meta["finish_reason"]
    adapters = meta.get(ADAPTER_VERSIONS)
    return {
        "index": index,
        "token_ids": tokens,
        "logprobs": None
        if logprobs is None
        else {"content": _content(meta, logprobs, since, since + len(tokens))},
        "finish_reason": reason["type"] if reason else None,
        "weight_versions": meta.get("weight_versions"),
        **({} if adapters is None else {ADAPTER_VERSIONS: adapters}),
    }


def describe_usage(prompt_tokens: int, metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the usage of one prompt's outputs. SGLang sets no ``cached_tokens`` before a run."""
    made = sum(meta["completion_tokens"] for meta in metas)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": metas[0].get("cached_tokens", 0)},
    }


def describe_prompt(token_ids: Sequence[int], meta: dict[str, Any]) -> list[dict[str, Any] | None]:
    """Return logprobs by position: the prompt's own token first. Position 0 has none."""
    # token ids come from the prompt: SGLang reports the vocabulary's last token as 0
    sampled: list[Logprob] = [
        (value, token, text)
        for token, (value, _, text) in zip(token_ids, meta["input_token_logprobs"], strict=True)
    ]
    tops: list[list[Logprob] | None] = meta.get("input_top_logprobs") or [None] * len(sampled)
    return [
        None
        if own[0] is None
        else {str(token): _entry(value) for value, token, _ in _first(own, top or ())}
        for own, top in zip(sampled, tops, strict=True)
    ]


def _content(meta: dict[str, Any], logprobs: int, since: int, until: int) -> list[dict[str, Any]]:
    sampled: list[Logprob] = meta["output_token_logprobs"][since:until]
    tops: list[list[Logprob] | None] = [None] * len(sampled)
    if logprobs > 1:
        tops = meta["output_top_logprobs"][since:until]
    return [
        {
            **_named(own),
            "top_logprobs": [_named(each) for each in _first(own, top or ())][: max(logprobs, 1)],
        }
        for own, top in zip(sampled, tops, strict=True)
    ]


def _first(own: Logprob, others: Iterable[Logprob]) -> list[Logprob]:
    """Return a position's own token, then the others by rank."""
    return [own, *(other for other in others if other[1] != own[1])]


def _named(logprob: Logprob) -> dict[str, Any]:
    """Return a token's entry: vLLM 0.32 reads ``token``, later versions ``token_id``."""
    value, token, _ = logprob
    return {"token": f"token_id:{token}", "token_id": token, "logprob": _floored(value)}


def _entry(value: float | None) -> dict[str, Any]:
    return {"logprob": _floored(value), "rank": None, "decoded_token": None}


def _floored(value: float | None) -> float:
    return LOWEST if value is None or not math.isfinite(value) else max(value, LOWEST)

"""Write vLLM's choices of ``/inference/v1/generate`` from SGLang's ``meta_info``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_inflight.extensions.vllm.records import (
    masks_of,
    pack_masks,
    spans_of,
)
from sglang_inflight.vocabulary.so_far import OUTPUT_SO_FAR, describe_output

# vLLM's floor: JSON has no infinity
LOWEST = -9999.0

# value, token, and the token's text, not requested here
Logprob = tuple[float | None, int, str | None]


@dataclass(frozen=True)
class Choices:
    """Contents of one request's choices, besides tokens and spans."""

    # number of likeliest tokens by position, of which the sampled one is the first; None: no
    # logprobs at all
    logprobs: int | None
    # each token's sampling mask
    masks: bool
    # returns the experts of a choice's tokens from its meta_info
    experts: Callable[[dict[str, Any]], Any] | None
    # what another server needs to go on, of the choice's tokens
    outputs: bool
    # columns of SkyRL's array of masks; None for vLLM's lists
    columns: int | None

    def describe(
        self, index: int, tokens: Sequence[int], meta: dict[str, Any], *, since: int = 0
    ) -> dict[str, Any]:
        """Return the choice for ``tokens``, beginning at the output's ``since``-th.

        The spans are those of the whole output so far. Experts and ``kv_versions`` cover the prompt
        as well, and come at the output's end.
        """
        reason = meta["finish_reason"]
        until = since + len(tokens)
        masks = masks_of(meta, since, until) if self.masks else None
        return {
            "index": index,
            "token_ids": tokens,
            "logprobs": self._logprobs(tokens, meta, since, masks),
            "finish_reason": reason["type"] if reason else None,
            "routed_experts": None if self.experts is None else self.experts(meta),
            **self._masks(masks),
            **spans_of(meta),
            **self._output(tokens, meta, since),
        }

    def _output(
        self, tokens: Sequence[int], meta: dict[str, Any], since: int
    ) -> dict[str, dict[str, list[Any]]]:
        return {OUTPUT_SO_FAR: describe_output(list(tokens), meta, since)} if self.outputs else {}

    def _logprobs(
        self,
        tokens: Sequence[int],
        meta: dict[str, Any],
        since: int,
        masks: list[list[int]] | None,
    ) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        until = since + len(tokens)
        if masks is None:
            return {"content": _content(meta, self.logprobs, since, until)}
        behaviour = meta.get("output_token_sampling_logprobs", ())[since:until]
        return {"content": _masked_content(tokens, masks, behaviour, self.logprobs)}

    def _masks(self, masks: list[list[int]] | None) -> dict[str, Any]:
        if self.columns is None:
            return {"sampling_mask": masks}
        packed = None if masks is None else pack_masks(masks, self.columns)
        return {"rollout_sample_support": packed}


def describe_usage(prompt_tokens: int, metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the usage of one prompt's outputs. SGLang sets no ``cached_tokens`` before a run."""
    made = sum(meta["completion_tokens"] for meta in metas)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": metas[0].get("cached_tokens", 0)},
    }


def describe_prompt(
    token_ids: Sequence[int], meta: dict[str, Any], count: int
) -> list[dict[str, Any] | None]:
    """Return logprobs by position, of the prompt's own token and the ``count`` likeliest ones.

    The prompt's own token comes first. Position 0 has none.
    """
    # token ids come from the prompt: SGLang reports the vocabulary's last token as 0
    sampled: list[Logprob] = [
        (value, token, text)
        for token, (value, _, text) in zip(token_ids, meta["input_token_logprobs"], strict=True)
    ]
    tops: list[list[Logprob] | None] = meta.get("input_top_logprobs") or [None] * len(sampled)
    return [
        None if own[0] is None else _ranked(own, (top or ())[:count])
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


def _masked_content(
    tokens: Sequence[int],
    masks: Sequence[Sequence[int]],
    behaviour: Sequence[float | list[float]],
    logprobs: int,
) -> list[dict[str, Any]]:
    """Return the entries of tokens with masks, as vLLM's: each logprob is over its mask alone.

    ``behaviour`` has each token's logprob, or those of its mask, the likeliest first.
    """
    entries = []
    for token, mask, value in zip(tokens, masks, behaviour, strict=True):
        listed: list[Logprob] = []
        if isinstance(value, list):
            listed = [(each, other, None) for each, other in zip(value, mask, strict=True)]
            value = value[mask.index(token)]
        own: Logprob = (value, token, None)
        tops = [_named(each) for each in _first(own, listed)][: max(logprobs, 1)]
        entries.append({**_named(own), "top_logprobs": tops})
    return entries


def _first(own: Logprob, others: Iterable[Logprob]) -> list[Logprob]:
    """Return a position's own token, then the others by rank."""
    return [own, *(other for other in others if other[1] != own[1])]


def _named(logprob: Logprob) -> dict[str, Any]:
    """Return a token's entry: vLLM 0.32 reads ``token``, later versions ``token_id``."""
    value, token, _ = logprob
    return {"token": f"token_id:{token}", "token_id": token, "logprob": _floored(value)}


def _ranked(own: Logprob, likeliest: Sequence[Logprob]) -> dict[str, Any]:
    """Return a prompt's position by token id.

    SGLang does not rank a token beyond the likeliest ones. Its rank is the least possible one,
    because clients sort by rank, and null if no others are listed.
    """
    ranks = {token: rank for rank, (_, token, _) in enumerate(likeliest, start=1)}
    beyond = len(likeliest) + 1 if likeliest else None
    return {
        str(token): {
            "logprob": _floored(value),
            "rank": ranks.get(token, beyond),
            "decoded_token": None,
        }
        for value, token, _ in _first(own, likeliest)
    }


def _floored(value: float | None) -> float:
    return LOWEST if value is None or not math.isfinite(value) else max(value, LOWEST)

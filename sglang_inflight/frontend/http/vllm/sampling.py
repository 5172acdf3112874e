"""Convert vLLM's sampling parameters to SGLang's."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from sglang_inflight.vocabulary.bodies import Body
from sglang_inflight.vocabulary.errors import NotOffered

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]

# vLLM's name: SGLang's name
_NAMES = {
    "n": "n",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "sampling_seed",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "min_tokens": "min_new_tokens",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "stream_interval": "stream_interval",
    "logit_bias": "logit_bias",
    "extra_args": "custom_params",
}

# refused: they change the tokens, and SGLang has no equivalent or another interface
_NOT_OFFERED = (
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "repetition_detection",
    "structured_outputs",
    "thinking_token_budget",
    "trace_decode_token_ids",
)


class Sampling(Body, kw_only=True, forbid_unknown_fields=False):
    """vLLM's sampling parameters. Other fields are ignored: they change no token."""

    n: Positive = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    # 0 and -1: all tokens
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    ignore_eos: bool | None = None
    # None: up to the context's length
    max_tokens: Positive | None = None
    min_tokens: Count | None = None
    # number of most likely tokens beside the sampled one; None: no logprobs at all
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream_interval: Positive | None = None
    logit_bias: dict[str, float] | None = None
    extra_args: dict[str, Any] | None = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    logprob_token_ids: Any = None
    prompt_logprob_token_ids: Any = None
    repetition_detection: Any = None
    structured_outputs: Any = None
    thinking_token_budget: Any = None
    trace_decode_token_ids: Any = None

    def for_sglang(self) -> dict[str, Any]:
        """Return SGLang's parameters. Raises ``NotOffered`` for parameters without equivalent."""
        for name in _NOT_OFFERED:
            if getattr(self, name):
                raise NotOffered(
                    f"sampling_params.{name} is not offered here: see SGLang's /generate"
                )
        if self.ignore_eos and self.stop_token_ids:
            raise NotOffered(
                "ignore_eos with stop_token_ids is not offered: SGLang ignores both kinds then"
            )
        given = {
            theirs: value
            for ours, theirs in _NAMES.items()
            if (value := getattr(self, ours)) is not None
        }
        return {**given, "top_k": self.top_k or -1, "max_new_tokens": self.max_tokens}

    @property
    def most_likely(self) -> int:
        """Number of most likely tokens to request from SGLang at each position."""
        # vLLM lists the sampled token first, so one logprob needs no others
        listed = self.logprobs if self.logprobs is not None and self.logprobs > 1 else 0
        return max(listed, self.prompt_logprobs or 0)

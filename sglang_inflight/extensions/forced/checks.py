"""Checks of ``forced_token_ids`` and ``sample_after_forced``, at the tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_inflight import capabilities
from sglang_inflight.extensions.forced import FORCED_TOKEN_IDS, SAMPLE_AFTER_FORCED
from sglang_inflight.frontend.requests.checks import MESSAGE, PARAMETERS
from sglang_inflight.frontend.requests.values import Prompt, is_whole, read_count, read_if_active
from sglang_inflight.vocabulary.contracts import custom_param

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_inflight.frontend.frontend import Frontend


@PARAMETERS.join(order=47)
def check_forced_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Let the request end behind its forced tokens, or ``sample_after_forced`` tokens later.

    Raises ``ValueError`` (a 400 over HTTP) for tokens outside of the vocabulary, and for a number
    that is not whole, or below 0.
    """
    forced = read_if_active(params, FORCED_TOKEN_IDS)
    more = read_count(params, SAMPLE_AFTER_FORCED)
    if forced is None:
        if more is not None:
            raise ValueError(f"custom_params.{SAMPLE_AFTER_FORCED} needs {FORCED_TOKEN_IDS}")
        return
    if not isinstance(forced, list) or not forced:
        raise ValueError(f"custom_params.{FORCED_TOKEN_IDS} must be a list of token ids")
    for place, token in enumerate(forced):
        if not is_whole(token) or not 0 <= token < vocab_size:
            raise ValueError(
                f"custom_params.{FORCED_TOKEN_IDS}[{place}] must be a token id from 0 to "
                f"{vocab_size - 1}; got {token!r}"
            )
    params.max_new_tokens = len(forced) + (more or 0)


@MESSAGE.join(order=62)
def require_forcible(frontend: Frontend, prompt: Prompt) -> None:
    """Raise ``ValueError`` if the tokens cannot be forced here, or go beyond the context."""
    params = prompt.message.sampling_params
    if custom_param(params, FORCED_TOKEN_IDS) is None:
        return
    can = capabilities.now(frontend.can)
    is_beam_search = (params.beam_width or 1) > 1
    why = can.forced_tokens or ("a beam search chooses its own tokens" if is_beam_search else None)
    if why is not None:
        raise ValueError(f"custom_params.{FORCED_TOKEN_IDS} is not possible here: {why}")
    tokens, room = len(prompt.message.input_ids or ()), prompt.config.context_len
    if tokens + params.max_new_tokens > room:
        raise ValueError(
            f"custom_params.{FORCED_TOKEN_IDS}: {tokens} tokens of the prompt and "
            f"{params.max_new_tokens} new ones are more than the context's {room}"
        )

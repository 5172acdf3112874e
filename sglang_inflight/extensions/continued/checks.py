"""Checks of ``output_so_far``, at the tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_inflight import capabilities
from sglang_inflight.extensions.continued.so_far import OutputSoFar, read_so_far
from sglang_inflight.frontend.requests.checks import MESSAGE, PARAMETERS
from sglang_inflight.frontend.requests.values import Prompt, read_if_active
from sglang_inflight.vocabulary.contracts import custom_param
from sglang_inflight.vocabulary.so_far import OUTPUT_SO_FAR

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_inflight.frontend.frontend import Frontend


@PARAMETERS.join(order=50)
def check_so_far(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``ValueError`` (a 400 over HTTP) for a malformed output, or one that is complete."""
    given = read_if_active(params, OUTPUT_SO_FAR)
    if given is None:
        return
    try:
        so_far = read_so_far(given)
    except ValueError as error:
        raise ValueError(f"custom_params.{OUTPUT_SO_FAR}: {error}") from error
    _require_tokens(so_far, vocab_size)
    most = params.max_new_tokens
    if most is not None and len(so_far.token_ids) >= most:
        raise ValueError(
            f"custom_params.{OUTPUT_SO_FAR} has {len(so_far.token_ids)} tokens, and "
            f"max_new_tokens, which counts them, is {most}"
        )


def _require_tokens(so_far: OutputSoFar, vocab_size: int) -> None:
    likely = (*(so_far.top_logprobs or ()), *(so_far.token_ids_logprobs or ()))
    tokens = [*so_far.token_ids, *(token for row in likely for _, token in row)]
    if (highest := max(tokens)) >= vocab_size:
        raise ValueError(
            f"custom_params.{OUTPUT_SO_FAR} has token {highest}, outside of the vocabulary of "
            f"{vocab_size}"
        )


@MESSAGE.join(order=65)
def require_continuable(frontend: Frontend, prompt: Prompt) -> None:
    """Raise ``ValueError`` if the request cannot go on here, or lacks what its answer needs."""
    obj, message = prompt.obj, prompt.message
    given = custom_param(message.sampling_params, OUTPUT_SO_FAR)
    if given is None:
        return
    if (why := capabilities.now(frontend.can).continued) is not None:
        raise ValueError(f"custom_params.{OUTPUT_SO_FAR} is not possible here: {why}")
    so_far = read_so_far(given)
    pinned = custom_param(message.sampling_params, "weight_version")
    reasons = {
        f"weight_version {pinned!r} is about every token, and other versions have made some": (
            pinned is not None and any(s.version != pinned for s in so_far.weight_versions)
        ),
        "a beam search has no one output": (message.sampling_params.beam_width or 1) > 1,
        "images, audio and video are not supported": obj.contains_mm_input(),
        "input_embeds are not supported": message.input_embeds is not None,
        "a session has its own output": bool(message.session_params or message.session_id),
        "the log probabilities of a prompt come from the request's first server: leave out "
        "logprob_start_len": 0 <= message.logprob_start_len < len(message.input_ids),
        "return_sampling_mask needs the masks of all tokens": message.return_sampling_mask,
        "return_hidden_states needs those of all tokens": bool(message.return_hidden_states),
        'record: "replay" is of one server': custom_param(message.sampling_params, "record")
        is not None,
        "return_logprob needs logprobs": message.return_logprob and so_far.logprobs is None,
        "top_logprobs_num needs top_logprobs": (
            message.return_logprob and message.top_logprobs_num > 0 and so_far.top_logprobs is None
        ),
        "token_ids_logprob needs token_ids_logprobs": (
            message.return_logprob
            and message.token_ids_logprob is not None
            and so_far.token_ids_logprobs is None
        ),
        "a request with an adapter needs adapter_versions": (
            obj.lora_path is not None and not so_far.adapter_versions
        ),
    }
    for why, is_so in reasons.items():
        if is_so:
            raise ValueError(f"custom_params.{OUTPUT_SO_FAR}: {why}")
    length, most = len(message.input_ids) + len(so_far.token_ids), prompt.config.context_len
    if length >= most:
        raise ValueError(
            f"custom_params.{OUTPUT_SO_FAR}: prompt and output have {length} tokens, and the "
            f"context has {most}"
        )

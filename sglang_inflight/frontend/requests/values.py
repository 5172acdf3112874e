"""Checks of values that would crash a scheduler (``checks.py`` has their order).

If a request raises in the scheduler's loop, the scheduler ends, and all of its requests with it.
On CUDA an index out of bounds ends the process, and catching helps nothing. So the front end
checks every request where HTTP, gRPC and ``Engine`` meet, alone or in a batch, text or tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from sglang.srt.environ import envs
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.utils.msgpack_utils import dec_hook, enc_hook, ext_hook

from sglang_inflight.hooking import AFTER, hook
from sglang_inflight.inactive import why_inactive
from sglang_inflight.sglang_types import (
    get_memory,
    get_schedule,
)
from sglang_inflight.vocabulary.contracts import custom_param

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.sampling.sampling_params import SamplingParams


class Prompt(NamedTuple):
    """One prompt of a call."""

    # SGLang's request of this prompt
    obj: Any
    input_ids: Sequence[int] | None
    config: ModelConfig
    # what goes to the schedulers; None before it is made
    message: Any = None


def read_if_active(params: SamplingParams, name: str) -> Any:
    """Return a field of ``custom_params``. Raise ``ValueError`` if no scheduler would heed it."""
    value = custom_param(params, name)
    if value is not None and (why := why_inactive()) is not None:
        raise ValueError(f"custom_params.{name}: {why}")
    return value


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_count(params: SamplingParams, name: str) -> int | None:
    """Return a field of ``custom_params`` that counts something, or None without the field.

    Raises ``ValueError`` for a value that is no whole number, 0 or more, and if no scheduler would
    heed it.
    """
    count = read_if_active(params, name)
    if count is None:
        return None
    if not is_whole(count) or count < 0:
        raise ValueError(f"custom_params.{name} must be a whole number, 0 or more; got {count!r}")
    return int(count)


# outputs of one prompt; the front end allocates some KB for each at once
MOST_SAMPLES = 16384
# Logits are float32. A bias is added, then a penalty and a temperature (at least 1e-6) divide.
# Beyond these limits a logit becomes infinite, and the probabilities NaN.
MOST_BIAS = 1e30
LEAST_PENALTY = 1e-20
# schedulers store top_k in 32 bits
MOST_TOP_K = (1 << 31) - 1

# skipped by the type check: large with checks of their own, or made by the front end itself
_NOT_LOOKED_AT = {
    "input_ids",
    "input_embeds",
    "mm_inputs",
    "positional_embed_overrides",
    "time_stats",
}
if envs.SGLANG_USE_PICKLE_IPC.get():
    # any type, for the request's own logit processor: the scheduler itself does not read it
    _NOT_LOOKED_AT |= {"custom_params"}
# never converted: the front end has registered the request by these
_KEPT = {"rid", "http_worker_ipc"}


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Check sampling parameters before SGLang's own checks, if the server runs with us."""
    if why_inactive() is not None:
        return
    if params.top_k == 0:
        # 0 means all tokens, as in vLLM and transformers
        params.top_k = TOP_K_ALL
    if params.top_k > MOST_TOP_K:
        raise ValueError(f"top_k is {params.top_k}, and at most {MOST_TOP_K}; -1 takes all tokens")
    if 0 < params.repetition_penalty < LEAST_PENALTY:
        raise ValueError(
            f"repetition_penalty is {params.repetition_penalty}, and at least {LEAST_PENALTY}"
        )
    if params.logit_bias:
        # keys are strings in JSON, and numbers from Python's callers
        params.logit_bias = {str(token): bias for token, bias in params.logit_bias.items()}
    for token_id, bias in (params.logit_bias or {}).items():
        if not bias <= MOST_BIAS:
            raise ValueError(f"logit_bias of {token_id} is {bias}, and at most {MOST_BIAS}")
    if sum(bias < -MOST_BIAS for bias in (params.logit_bias or {}).values()) >= vocab_size:
        raise ValueError("logit_bias leaves no token of the vocabulary")
    # Drop stop tokens outside the vocabulary, as of another model: they never occur. But if any
    # request of the batch has min_new_tokens, a scheduler indexes the logits by all of them.
    if params.stop_token_ids:
        known = {token for token in params.stop_token_ids if 0 <= token < vocab_size}
        params.stop_token_ids = known or None
        if params.min_new_tokens and len(known) >= vocab_size:
            raise ValueError("stop_token_ids leaves no token of the vocabulary to min_new_tokens")


@hook("sglang.srt.managers.io_struct.GenerateReqInput._handle_parallel_sampling", AFTER)
def check_samples(_: None, obj: Any) -> None:
    """Check ``n`` before SGLang allocates anything per sample."""
    if why_inactive() is not None:
        return
    count = obj.parallel_sample_num
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_SAMPLES:
        raise ValueError(f"n must be a whole number from 1 to {MOST_SAMPLES}; got {count!r}")


def require_tokens(_: object, prompt: Prompt) -> None:
    """Require tokens of the vocabulary."""
    input_ids = prompt.input_ids
    # an encoder's placeholders are not token ids, and models do not look them up
    if input_ids is None or prompt.obj.contains_mm_input():
        return
    if not input_ids:
        # a session may hold the whole prompt
        if not getattr(prompt.obj, "session_params", None):
            raise ValueError("the prompt has no tokens")
        return
    # some models have embeddings of tokens above ``vocab_size``
    known = max(prompt.config.vocab_size, prompt.config.hf_text_config.vocab_size)
    if min(input_ids) >= 0 and max(input_ids) < known:
        return
    position, token = next(
        (position, token) for position, token in enumerate(input_ids) if not 0 <= token < known
    )
    raise ValueError(
        f"the prompt's token at position {position} is {token}, and the vocabulary has "
        f"{known} tokens"
    )


def require_options(_: object, prompt: Prompt) -> None:
    """Require options in their range. A processor is decoded and not run: schedulers run it."""
    obj, config = prompt.obj, prompt.config
    if not isinstance(obj, GenerateReqInput):
        return
    count, start = obj.top_logprobs_num, obj.logprob_start_len
    if not isinstance(count, int) or not 0 <= count <= config.vocab_size:
        raise ValueError(
            f"top_logprobs_num is {count!r}, and must be from 0 to {config.vocab_size}, the "
            "vocabulary"
        )
    if not isinstance(start, int) or start < -1:
        raise ValueError(
            f"logprob_start_len is {start!r}, and must be -1 (the output's tokens alone) or more"
        )
    for position, embedding in enumerate(obj.input_embeds or ()):
        if not isinstance(embedding, list) or len(embedding) != config.hidden_size:
            raise ValueError(
                f"input_embeds must be lists of {config.hidden_size} numbers; the one at position "
                f"{position} is not"
            )
    given: Any = obj.custom_logit_processor
    try:
        if given:
            processor = msgspec.json.decode(given, type=_Processor)
            bytes.fromhex(processor.callable)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise ValueError(f"custom_logit_processor is not what to_str() gives: {error}") from error


class _Processor(msgspec.Struct):
    callable: str


def require_positions(_: object, prompt: Prompt) -> None:
    """Require positions of the prompt, and for some that a step computes whole prompts.

    ``token_indices_to_pool`` count in the whole prompt, and index the tokens computed by one step.
    SGLang's own calls for scores compute whole prompts.
    """
    if prompt.obj.token_indices_to_pool is not None and (
        not get_memory().disable_radix_cache or get_schedule().chunked_prefill_size != -1
    ):
        raise ValueError(
            "token_indices_to_pool needs a server with --disable-radix-cache and "
            "--chunked-prefill-size -1"
        )
    for name in ("multi_item_delimiter_indices", "token_indices_to_pool"):
        _require_positions(name, getattr(prompt.obj, name), prompt)


def _require_positions(name: str, positions: Any, prompt: Prompt) -> None:
    tokens = len(prompt.input_ids or ())
    for position in positions or ():
        if not isinstance(position, int) or not 0 <= position < tokens:
            raise ValueError(f"{name} has {position!r}, and the prompt has {tokens} tokens")


def require_public_name(_: object, prompt: Prompt) -> None:
    if prompt.obj.lora_id is not None and not prompt.obj.lora_path:
        raise ValueError("lora_id is internal to the server: name the adapter by lora_path")


def require_overrides(_: object, prompt: Prompt) -> None:
    """Check overrides. HTTP lets any value through, but cannot carry ``PositionalEmbeds``."""
    overrides, config = prompt.message.positional_embed_overrides, prompt.config
    if overrides is None:
        return
    if not isinstance(overrides, PositionalEmbeds):
        raise ValueError("positional_embed_overrides must be PositionalEmbeds, from Python alone")
    _require_positions("positional_embed_overrides", overrides.positions, prompt)
    width = overrides.embeds.shape[-1] if isinstance(overrides.embeds, torch.Tensor) else None
    if width not in (None, config.hidden_size):
        raise ValueError(
            f"positional_embed_overrides have width {width}; the model has {config.hidden_size}"
        )


def require_types(_: object, prompt: Prompt) -> None:
    _require_types(prompt.message)


def _require_types(message: msgspec.Struct, within: str = "") -> None:
    """Check the message's field types; a scheduler may crash on a wrong type.

    SGLang passes values of any type on, and some wrong types are harmless. So convertible values
    are converted: 16.0 becomes 16, 1 becomes true.
    """
    for name, decoder in _decoders(type(message)):
        value = getattr(message, name)
        try:
            decoder.decode(_encoder.encode(value))
        except (msgspec.MsgspecError, TypeError, OverflowError) as error:
            if isinstance(value, msgspec.Struct):
                # msgspec's error has the field's index, not its name: check field by field
                _require_types(value, f"{within}{name}.")
            else:
                setattr(message, name, _of_type(message, name, value, f"{within}{name}: {error}"))


def _of_type(message: msgspec.Struct, name: str, value: Any, wrong: str) -> Any:
    """Return ``value`` converted by pydantic, as SGLang converts HTTP bodies."""
    if name in _KEPT:
        raise ValueError(wrong)
    try:
        return _converters(type(message))[name].validate_python(value)
    except ValidationError as error:
        raise ValueError(wrong) from error


_encoder = msgspec.msgpack.Encoder(enc_hook=enc_hook)


@functools.cache
def _decoders(kind: type[msgspec.Struct]) -> list[tuple[str, msgspec.msgpack.Decoder[Any]]]:
    return [
        (
            field.name,
            msgspec.msgpack.Decoder(field.type, dec_hook=dec_hook, ext_hook=ext_hook),
        )
        for field in msgspec.structs.fields(kind)
        if field.name not in _NOT_LOOKED_AT
    ]


@functools.cache
def _converters(kind: type[msgspec.Struct]) -> dict[str, TypeAdapter[Any]]:
    """Return a message type's converters, made on first use: few requests need one."""
    anything = ConfigDict(arbitrary_types_allowed=True)
    return {
        field.name: TypeAdapter(field.type, config=anything)
        for field in msgspec.structs.fields(kind)
        if field.name not in _NOT_LOOKED_AT
    }

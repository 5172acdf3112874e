"""Checks of requests for what forwards captured."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from sglang_inflight.frontend.requests.checks import MESSAGE, PARAMETERS
from sglang_inflight.frontend.requests.values import Prompt, read_if_active
from sglang_inflight.messages import RECORDS, Records
from sglang_inflight.sglang_types import (
    get_disagg,
    get_exec,
    get_memory,
    get_parallel,
    get_schedule,
    get_spec,
)
from sglang_inflight.vocabulary.contracts import custom_param

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams


@PARAMETERS.join(order=20)
def check_records(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``ValueError`` (a 400 over HTTP) for any value but ``"sampled"`` and ``"recomputed"``.

    Raise also if this server runs without us: the records would always be SGLang's.
    """
    asked = read_if_active(params, RECORDS)
    if asked is not None and asked not in get_args(Records):
        allowed = " or ".join(f'"{each}"' for each in get_args(Records))
        raise ValueError(f"custom_params.{RECORDS} must be {allowed}; got {asked!r}")


@MESSAGE.join(order=20)
def require_captured_rows(_: object, prompt: Prompt) -> None:
    """Require that SGLang captures the rows of a request, and finds them by the request's slots."""
    tokenized = prompt.message
    for name in "return_routed_experts", "return_indexer_topk":
        # a server without the option answers without rows
        if getattr(tokenized, name, False) and getattr(get_exec().features, f"enable_{name}"):
            if (why := why_no_rows()) is not None:
                raise ValueError(f"{name}: {why}")
            is_speculating = get_spec().speculative_algorithm is not None
            is_indexer = name == "return_indexer_topk"
            if is_indexer and is_speculating and get_schedule().disable_overlap_schedule:
                raise ValueError(
                    f"{name}: SGLang lets drafts write over it with --disable-overlap-schedule"
                )
            records = custom_param(tokenized.sampling_params, RECORDS)
            if records == "recomputed" and get_disagg().disaggregation_mode == "decode":
                raise ValueError(
                    f"custom_params.{RECORDS} is {records!r}, and a decode server computes no KV "
                    "again"
                )


def why_no_rows() -> str | None:
    """Return why this server cannot return what SGLang captures, if it captures anything."""
    if get_parallel().pp_size > 1:
        return "SGLang returns only the layers of the first stage with --pp-size above 1"
    memory = get_memory()
    if memory.enable_hierarchical_cache or memory.enable_lmcache or memory.enable_flexkv:
        return (
            "SGLang does not move captured rows with KV, which leaves the device and returns with "
            "--enable-hierarchical-cache, --enable-lmcache or --enable-flexkv"
        )
    spec = get_spec()
    if spec.speculative_algorithm == "NGRAM" or (spec.speculative_eagle_topk or 1) > 1:
        return (
            "SGLang does not move captured rows with the KV of accepted tokens, which moves with "
            "NGRAM or --speculative-eagle-topk above 1"
        )
    return None

"""Checks of a request's own ``kv_max_age``: the oldest KV, in commits, that may serve it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_inflight import capabilities
from sglang_inflight.frontend.requests.values import Prompt, read_count
from sglang_inflight.vocabulary.contracts import custom_param
from sglang_inflight.vocabulary.kept_kv import KV_MAX_AGE

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_inflight.frontend.frontend import Frontend


def check_kv_max_age(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``ValueError`` (a 400 over HTTP) for a value that is no whole number, 0 or more."""
    read_count(params, KV_MAX_AGE)


def require_ages(frontend: Frontend, prompt: Prompt) -> None:
    """Raise ``ValueError`` if the request has a bound, and no scheduler can keep it."""
    if custom_param(prompt.message.sampling_params, KV_MAX_AGE) is None:
        return
    if (why := capabilities.now(frontend.can).kv_max_age) is not None:
        raise ValueError(f"custom_params.{KV_MAX_AGE} is not possible here: {why}")
    if prompt.obj.contains_mm_input():
        raise ValueError(
            f"custom_params.{KV_MAX_AGE} is not possible here: embeddings of images, audio and "
            "video are cached without their version"
        )

"""Checks of ``kv_lease_s``: for how long a request's KV is kept after its end, in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_inflight import capabilities
from sglang_inflight.extensions.leases import KV_LEASE_S
from sglang_inflight.frontend.requests.checks import MESSAGE, PARAMETERS
from sglang_inflight.frontend.requests.values import Prompt, read_if_active
from sglang_inflight.vocabulary.bodies import LONGEST_WAIT_S
from sglang_inflight.vocabulary.contracts import custom_param

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_inflight.frontend.frontend import Frontend


@PARAMETERS.join(order=46)
def check_kv_lease(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``ValueError`` (a 400 over HTTP) for a value that is no number of seconds."""
    seconds = read_if_active(params, KV_LEASE_S)
    if seconds is None:
        return
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= LONGEST_WAIT_S:
        raise ValueError(
            f"custom_params.{KV_LEASE_S} must be a number of seconds above 0, at most "
            f"{LONGEST_WAIT_S:g}; got {seconds!r}"
        )


@MESSAGE.join(order=61)
def require_leasable(frontend: Frontend, prompt: Prompt) -> None:
    """Raise ``ValueError`` if the request's KV cannot be kept here."""
    if custom_param(prompt.message.sampling_params, KV_LEASE_S) is None:
        return
    reasons = {
        "a streaming session keeps its KV by itself": getattr(prompt.obj, "session_params", None),
        "the KV of images, audio and video is not computed again without them": (
            prompt.obj.contains_mm_input()
        ),
        "the prompt is embeddings": getattr(prompt.obj, "input_embeds", None) is not None,
    }
    can = capabilities.now(frontend.can)
    for why in (can.kv_max_age, *(why for why, is_so in reasons.items() if is_so)):
        if why is not None:
            raise ValueError(f"custom_params.{KV_LEASE_S} is not possible here: {why}")

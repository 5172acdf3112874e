"""Check of ``custom_params.record``, at the tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_inflight.extensions.trails import RECORD, REPLAY
from sglang_inflight.frontend.requests.checks import MESSAGE, PARAMETERS
from sglang_inflight.frontend.requests.values import Prompt, read_if_active
from sglang_inflight.settings import Settings
from sglang_inflight.sglang_types import get_disagg, get_parallel, get_spec
from sglang_inflight.vocabulary.contracts import custom_param

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams


@PARAMETERS.join(order=49)
def check_record(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``ValueError`` (a 400 over HTTP) for any value but ``"replay"``."""
    asked = read_if_active(params, RECORD)
    if asked is not None and asked != REPLAY:
        raise ValueError(f'custom_params.{RECORD} must be "{REPLAY}"; got {asked!r}')


@MESSAGE.join(order=63)
def require_recordable(_: object, prompt: Prompt) -> None:
    """Raise ``ValueError`` if this server does not know what happens to the request."""
    obj, params = prompt.obj, prompt.message.sampling_params
    if custom_param(params, RECORD) is None:
        return
    reasons = {
        "--pp-size above 1: nobody tried both": get_parallel().pp_size > 1,
        "--disaggregation-mode: two servers make one answer": (
            get_disagg().disaggregation_mode != "null"
        ),
        "speculative decoding: the host learns late how far a request is": (
            get_spec().speculative_algorithm is not None
        ),
        "a beam search": (params.beam_width or 1) > 1,
        "images, audio or video": obj.contains_mm_input(),
        "SGLANG_INFLIGHT_SPANS=sglang: the answer does not say which weights made its KV": (
            Settings.from_environment().spans == "sglang"
        ),
        "a session": bool(obj.session_id or getattr(obj, "session_params", None)),
    }
    for why, is_so in reasons.items():
        if is_so:
            raise ValueError(f"custom_params.{RECORD} is not possible with {why}")

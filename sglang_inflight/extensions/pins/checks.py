"""Check of a request that names the weights of all its tokens, at the tokenizer."""

from __future__ import annotations

from sglang_inflight import capabilities
from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.requests.checks import MESSAGE
from sglang_inflight.frontend.requests.values import Prompt
from sglang_inflight.vocabulary.contracts import WEIGHT_VERSION, custom_param


@MESSAGE.join(order=50)
def require_pinnable(frontend: Frontend, prompt: Prompt) -> None:
    """Raise ``ValueError`` if the request names its weights, and no scheduler can see to it."""
    obj, params = prompt.obj, prompt.message.sampling_params
    if custom_param(params, WEIGHT_VERSION) is None:
        return
    reasons = {
        "a session's request uses the KV of others": obj.session_id
        or getattr(obj, "session_params", None),
        "embeddings of images, audio and video are cached without their version": (
            obj.contains_mm_input()
        ),
        "a beam search keeps the steps to itself": (params.beam_width or 1) > 1,
    }
    can = capabilities.now(frontend.can)
    why_not = [can.pin, *(why for why, is_so in reasons.items() if is_so)]
    for why in filter(None, why_not):
        raise ValueError(f"{WEIGHT_VERSION} is not possible here: {why}")

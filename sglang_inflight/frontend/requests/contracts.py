"""Checks of version contracts, at the doors and at the tokenizer.

SGLang ignores unknown fields of a body, so a contract at the top level would be ignored. A door
that knows the body has the contract folded into ``custom_params``; other routes refuse it.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from sglang_inflight import capabilities
from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.requests.asked import Asked
from sglang_inflight.frontend.requests.values import Prompt
from sglang_inflight.frontend.requests.version_waits import demands_of
from sglang_inflight.inactive import why_inactive
from sglang_inflight.sglang_types import get_disagg, get_exec
from sglang_inflight.vocabulary.contracts import (
    WEIGHT_VERSION,
    fold,
    given_in,
    read_contract,
)
from sglang_inflight.vocabulary.errors import Refused

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams

# SGLang's routes that take a contract at the top level of the body
TAKEN = ("/generate", "/v1/completions", "/v1/chat/completions")
# SGLang's other routes of requests, where it would be ignored; OpenAI's others are refused by kind
REFUSED = (
    "/encode",
    "/classify",
    "/v1/responses",
    "/v1/messages",
    os.environ.get("SGLANG_OLLAMA_CHAT_ROUTE", "/api/chat"),
    os.environ.get("SGLANG_OLLAMA_GENERATE_ROUTE", "/api/generate"),
    os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate"),
)
_PLACES = f"{', '.join(TAKEN)}, /inference/v1/generate or sampling_params.custom_params"


def fold_contract(_: object, asked: Asked) -> None:
    """Fold a contract in the body into ``custom_params``.

    Raises ``Refused`` for a wrong contract, and for one that cannot be kept here.
    """
    given = given_in(asked.body)
    if given and asked.custom_params is None:
        raise not_taken(list(given), f"a {type(asked.request).__name__}")
    if given and asked.custom_params is not None:
        asked.custom_params = [fold(given, custom) for custom in asked.custom_params]
    for contract, adapter in demands_of(asked):
        if contract.min_epoch is not None and get_disagg().disaggregation_mode != "null":
            raise Refused(
                "min_epoch: the two servers of a pair (--disaggregation-mode) count epochs of "
                "their own; use min_weight_version or exact_weight_version"
            )
        if contract.is_about_adapter and adapter is None:
            raise Refused(
                "min_adapter_version and exact_adapter_version need a request with an adapter"
            )


def wait_for_version(frontend: Frontend, asked: Asked) -> Awaitable[None] | None:
    """Return what waits until every rank serves what the request asks for, unless they do now."""
    return frontend.version_waits.begin(asked)


def not_taken(names: list[str], where: str = "this route") -> Refused:
    return Refused(f"{', '.join(names)}: {where} takes no version contract; use {_PLACES}")


def check_contract(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``ValueError`` (a 400 over HTTP) for a version contract of wrong types.

    Raise also if this server runs without us: nobody would keep the contract.
    """
    try:
        contract = read_contract(params.custom_params)
    except Refused as error:
        raise ValueError(str(error)) from error
    if contract is not None and (why := why_inactive()) is not None:
        raise ValueError(f"a version contract: {why}")


def require_keepable(frontend: Frontend, prompt: Prompt) -> None:
    """Raise ``ValueError`` if the request names its weights, and no scheduler can see to it."""
    obj, params = prompt.obj, prompt.message.sampling_params
    contract = read_contract(params.custom_params)
    if contract is not None and get_exec().dllm.dllm_algorithm is not None:
        raise ValueError(
            "a version contract is not possible with --dllm-algorithm: its requests wait in queues "
            "of their own, where no commit ends them"
        )
    if contract is None or contract.weight_version is None:
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

"""Checks of version contracts, at the doors and at the tokenizer.

SGLang ignores unknown fields of a body, so a contract at the top level would be ignored. A door
that knows the body has the contract folded into ``custom_params``; other routes refuse it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sglang_inflight.frontend.requests.asked import Asked
from sglang_inflight.inactive import why_inactive
from sglang_inflight.vocabulary.contracts import (
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

    Raises ``Refused`` for a wrong contract, and where SGLang has no place for it.
    """
    given = given_in(asked.body)
    if given and asked.custom_params is None:
        raise not_taken(list(given), f"a {type(asked.request).__name__}")
    if given and asked.custom_params is not None:
        asked.custom_params = [fold(given, custom) for custom in asked.custom_params]


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

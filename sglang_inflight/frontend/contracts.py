"""Version contracts at the front end's doors.

SGLang ignores unknown fields of a body, so a contract at the top level would be ignored. Each door
that knows the body folds the contract into ``custom_params``; the other doors refuse it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from starlette.requests import Request

from sglang_inflight.vocabulary.contracts import fold, fold_into_sampling, given_in
from sglang_inflight.vocabulary.errors import Refused

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


async def read_fields(request: Any) -> dict[str, Any]:
    """Return the contract's fields in an HTTP request's body, parsed and cached by FastAPI.

    gRPC's requests have no body: their messages have no field for a contract.
    """
    if not isinstance(request, Request):
        return {}
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        body: Mapping[str, Any] = await request.form()
        return given_in(body)
    return given_in(await request.json())


async def fold_into_openai(request: Any, raw_request: Any) -> None:
    """Fold the body's contract into an OpenAI ``request``. Raises ``Refused`` for other kinds."""
    given = await read_fields(raw_request)
    if not given:
        return
    if not isinstance(request, CompletionRequest | ChatCompletionRequest):
        raise not_taken(list(given), f"a {type(request).__name__}")
    request.custom_params = fold(given, request.custom_params)


async def fold_into_generate(obj: GenerateReqInput, request: Request) -> None:
    """Fold the body's contract into a request, or each request of a batch, to ``/generate``."""
    obj.sampling_params = fold_into_sampling(await read_fields(request), obj.sampling_params)


def not_taken(names: list[str], where: str = "this route") -> Refused:
    return Refused(f"{', '.join(names)}: {where} takes no version contract; use {_PLACES}")

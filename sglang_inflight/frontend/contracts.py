"""Version contracts at the front end's doors.

SGLang ignores unknown fields of a body, so a contract at the top level would be ignored. Each door
that knows the body folds the contract into ``custom_params``; the other doors refuse it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from starlette.requests import Request

from sglang_inflight.vocabulary.contracts import fold, fold_into_sampling, given_in
from sglang_inflight.vocabulary.errors import Refused

# the routes, and methods of ``Engine``, that take a contract at the top level
PLACES = (
    "/generate, /v1/completions, /v1/chat/completions, /inference/v1/generate or "
    "sampling_params.custom_params"
)


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
        raise Refused(not_taken(given, f"a {type(request).__name__}"))
    request.custom_params = fold(given, request.custom_params)


async def fold_into_generate(obj: GenerateReqInput, request: Request) -> None:
    """Fold the body's contract into a request, or each request of a batch, to ``/generate``."""
    obj.sampling_params = fold_into_sampling(await read_fields(request), obj.sampling_params)


def not_taken(given: Mapping[str, Any], where: str) -> str:
    return f"{', '.join(given)}: {where} takes no version contract; use {PLACES}"

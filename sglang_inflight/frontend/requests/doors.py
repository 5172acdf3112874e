"""Doors, by which requests come in: each describes a request, and answers if it is refused.

Requests of ``/generate`` and of SGLang's OpenAI routes are checked before an answer begins. So a
refusal is a 503 for a stream, too: SGLang would begin a stream with 200 first. ``Engine``, gRPC and
all other routes are checked where all requests meet, at ``TokenizerManager.generate_request``.

SGLang ignores an adapter's name in ``model`` of an OpenAI route's body. Here ``model_names.py``
resolves the name, and an unknown name is refused.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import ORJSONResponse
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.http.answer_versions import AnswerVersions, content_of, headers_of
from sglang_inflight.frontend.http.endpoints import refusal
from sglang_inflight.frontend.requests.asked import Asked, as_list, names_of, read_body
from sglang_inflight.frontend.requests.checks import admit, no_adapters
from sglang_inflight.hooking import AROUND, OPENAI_SERVING, TOKENIZER_MANAGER, hook, with_us
from sglang_inflight.vocabulary.errors import InflightError, NotFound, Refused

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedOpenAIServing, PatchedTokenizerManager

logger = logging.getLogger(__name__)

# if this module cannot be imported, SGLang serves without it
_RESPONSES = "sglang.srt.entrypoints.openai.serving_responses"


def mount_generate(app: FastAPI, http_server: ModuleType, frontend: Frontend) -> None:
    """Put our ``/generate`` before SGLang's, which stays the one described in ``/openapi.json``.

    FastAPI parses the body for ours as for SGLang's, and SGLang's own function answers.
    """

    async def generate_request(obj: GenerateReqInput, request: Request) -> Response:
        try:
            asked = Asked.of(obj, await read_body(request))
            await admit(frontend, asked, request)
            asked.put_into(obj)
        except InflightError as error:
            logger.warning("%s refused: %s", request.url.path, error)
            return refusal(error)
        answer: Response = await http_server.generate_request(obj, request)
        return answer

    app.router.add_api_route(
        "/generate",
        generate_request,
        methods=["POST", "PUT"],
        response_model=None,
        include_in_schema=False,
    )
    app.router.routes.insert(0, app.router.routes.pop())


@hook(f"{OPENAI_SERVING}.handle_request", AROUND, when=with_us)
async def handle_request(
    handle: Callable[..., Awaitable[Any]],
    serving: PatchedOpenAIServing,
    request: Any,
    raw_request: Any,
) -> Any:
    """Wrap all of SGLang's OpenAI routes but ``/v1/responses``, on the front end's event loop."""
    try:
        takes_contract = isinstance(request, CompletionRequest | ChatCompletionRequest)
        asked = Asked(
            request=request,
            body=await read_body(raw_request),
            names=names_of(getattr(request, "rid", None)),
            model=getattr(request, "model", None),
            adapters=_adapters_of(request),
            custom_params=[request.custom_params] if takes_contract else None,
        )
        await admit(serving.tokenizer_manager.inflight, asked, raw_request)
        if takes_contract and asked.custom_params != [request.custom_params]:
            (request.custom_params,) = asked.custom_params or [None]
    except InflightError as error:
        return openai_refusal(request, error)
    return await handle(serving, request, raw_request)


@hook(f"{OPENAI_SERVING}._parse_model_parameter", AROUND, when=with_us)
def parse_model_parameter(
    parse: Callable[..., tuple[str, str | None]], serving: PatchedOpenAIServing, model: str
) -> tuple[str, str | None]:
    """Return the model and the adapter named by ``model``. Called on any thread.

    ``handle_request`` has refused bad names before. Other routes, such as Anthropic's, turn a
    ``ValueError`` into a 400; ``/v1/responses`` needs an ``HTTPException``.
    """
    names = serving.tokenizer_manager.inflight.model_names
    try:
        adapter = names.adapter_of(model)
        if adapter is None:
            return serving.tokenizer_manager.served_model_name, None
        if _is_of_responses(serving):
            raise Refused(no_adapters(model, "/v1/responses"))
    except InflightError as error:
        if _is_of_responses(serving):
            raise HTTPException(error.status, str(error)) from error
        raise ValueError(str(error)) from error
    return serving.tokenizer_manager.served_model_name, adapter


def _adapters_of(request: Any) -> list[str | None] | None:
    if isinstance(request, TokenizeRequest | DetokenizeRequest):
        # any adapter's tokenizer is the model's
        return [None]
    return as_list(request.lora_path) if hasattr(request, "lora_path") else None


def _is_of_responses(serving: PatchedOpenAIServing) -> bool:
    module = sys.modules.get(_RESPONSES)
    return module is not None and isinstance(serving, module.OpenAIServingResponses)


def openai_refusal(request: object, error: InflightError) -> ORJSONResponse:
    """Log why ``request`` is refused, and return the error in OpenAI's form.

    SGLang's clients find the message, too.
    """
    logger.warning("%s refused: %s", type(request).__name__, error)
    inner = {
        "message": str(error),
        "type": "invalid_request_error",
        "param": "model" if isinstance(error, NotFound) else None,
        "code": "model_not_found" if isinstance(error, NotFound) else error.status,
    }
    content = {"object": "error", "message": str(error), "error": inner, **content_of(error)}
    return ORJSONResponse(content, status_code=error.status, headers=headers_of(error))


class EndedInStream(ValueError):
    """An error of a stream: SGLang's streams turn a ``ValueError`` into their last event."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status_code = status


@hook(f"{TOKENIZER_MANAGER}.generate_request", AROUND, when=with_us)
async def pass_gate(
    generate: Callable[..., AsyncGenerator[Any, None]],
    tokenizer_manager: PatchedTokenizerManager,
    obj: Any,
    request: Any = None,
) -> AsyncGenerator[Any, None]:
    """Yield the outputs of ``obj`` once the request may go to the schedulers.

    Raises an ``HTTPException`` for a whole answer by HTTP, whose status SGLang's routes read, and
    ``EndedInStream`` for a stream. Raises the error itself for ``Engine``.
    """
    outputs = generate(tokenizer_manager, obj, request)
    notes = AnswerVersions.of(request)
    is_stream = bool(getattr(obj, "stream", False))
    try:
        if not notes.is_let_through:
            await _let_in(tokenizer_manager.inflight, Asked.of(obj, body={}))
        async for output in outputs:
            if notes.start is None:
                notes.note(output, is_whole=not is_stream)
            yield output
    except InflightError as error:
        if request is None:
            raise
        if is_stream:
            raise EndedInStream(str(error), error.status) from error
        raise HTTPException(error.status, str(error), headers_of(error)) from error
    except HTTPException as error:
        # the prefill of a prompt with several samples has ended
        if request is None or not is_stream:
            raise
        raise EndedInStream(str(error.detail), error.status_code) from error
    finally:
        await outputs.aclose()


async def _let_in(frontend: Frontend, asked: Asked) -> None:
    if not any(name.startswith(HEALTH_CHECK_RID_PREFIX) for name in asked.names):
        await admit(frontend, asked)

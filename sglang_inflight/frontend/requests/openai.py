"""The door of SGLang's OpenAI routes.

SGLang ignores an adapter's name in ``model``. Here ``model_names.py`` resolves the name, and an
unknown name is refused.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

from sglang_inflight.frontend.http.answer_versions import content_of, headers_of
from sglang_inflight.frontend.requests.asked import Asked, as_list, names_of, read_body
from sglang_inflight.frontend.requests.checks import admit, no_adapters
from sglang_inflight.hooking import AROUND, OPENAI_SERVING, hook, with_us
from sglang_inflight.vocabulary.errors import InflightError, NotFound, Refused

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedOpenAIServing

logger = logging.getLogger(__name__)

# if this module cannot be imported, SGLang serves without it
_RESPONSES = "sglang.srt.entrypoints.openai.serving_responses"


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
        return refusal(request, error)
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


def refusal(request: object, error: InflightError) -> ORJSONResponse:
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

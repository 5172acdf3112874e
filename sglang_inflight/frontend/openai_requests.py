"""Check requests to SGLang's OpenAI routes: model names, contracts.

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
    DetokenizeRequest,
    TokenizeRequest,
)

from sglang_inflight.frontend.http.answer_versions import content_of, headers_of
from sglang_inflight.frontend.http.doors import enter_openai
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
        _require_model(serving, request)
        await enter_openai(serving.tokenizer_manager.inflight, request, raw_request)
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
            raise Refused(_no_adapters(model, "/v1/responses"))
    except InflightError as error:
        if _is_of_responses(serving):
            raise HTTPException(error.status, str(error)) from error
        raise ValueError(str(error)) from error
    return serving.tokenizer_manager.served_model_name, adapter


def _require_model(serving: PatchedOpenAIServing, request: Any) -> None:
    model = getattr(request, "model", None)
    adapter = serving.tokenizer_manager.inflight.model_names.adapter_of(model)
    if adapter is None or isinstance(request, TokenizeRequest | DetokenizeRequest):
        return
    if not hasattr(request, "lora_path"):
        raise Refused(_no_adapters(model, f"a {type(request).__name__}"))
    also = request.lora_path
    for name in also if isinstance(also, list) else [also]:
        if name and name != adapter:
            raise Refused(
                f"model names the adapter {adapter!r}, and lora_path {name!r}: pass only one"
            )


def _no_adapters(model: str | None, where: str) -> str:
    return (
        f"the model {model!r} is an adapter, and SGLang serves {where} without adapters: use "
        "/v1/chat/completions, /v1/completions, /v1/embeddings or /generate"
    )


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

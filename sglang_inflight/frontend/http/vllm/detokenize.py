"""``/detokenize`` with ``text`` for SGLang's clients and ``prompt`` for vLLM's."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response
from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints.openai.protocol import DetokenizeRequest, DetokenizeResponse


async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return both texts: by default vLLM keeps special tokens, SGLang skips them."""
    text = await _decode(body, request)
    if not isinstance(text, DetokenizeResponse):
        return text
    prompt = text
    if "skip_special_tokens" not in body.model_fields_set:
        whole = body.model_copy(update={"skip_special_tokens": False})
        prompt = await _decode(whole, request)
        if not isinstance(prompt, DetokenizeResponse):
            return prompt
    return ORJSONResponse({"text": text.text, "prompt": prompt.text})


async def _decode(body: DetokenizeRequest, request: Request) -> Any:
    """Call SGLang's own handler; return its answer or its error response."""
    return await request.app.state.openai_serving_detokenize.handle_request(body, request)

"""``/detokenize`` for SGLang's clients, who read ``text``, and vLLM's, who read ``prompt``."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response
from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints.openai.protocol import DetokenizeRequest, DetokenizeResponse


async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """vLLM leaves special tokens in, SGLang leaves them out where nobody says otherwise."""
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
    """SGLang's own, which answers an error where it cannot."""
    return await request.app.state.openai_serving_detokenize.handle_request(body, request)

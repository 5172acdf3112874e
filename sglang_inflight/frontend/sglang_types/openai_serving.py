"""SGLang's handlers of its OpenAI routes."""

from __future__ import annotations

from typing import Any, Protocol

from sglang_inflight.frontend.sglang_types.tokenizer_manager import TokenizerManager
from sglang_inflight.sglang_types.describes import describes


@describes("sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase")
class OpenAIServing(Protocol):
    tokenizer_manager: TokenizerManager

    def _parse_model_parameter(self, model: str) -> tuple[str, str | None]: ...
    async def handle_request(self, request: Any, raw_request: Any) -> Any: ...

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.tokenizer_hooks import ROUTES

from .messages import CountCall

if TYPE_CHECKING:
    from fastapi import FastAPI

    from sglang_inflight.sglang_types import TokenizerManager


@ROUTES.join()
def add_route(app: FastAPI, frontend: Frontend, _: TokenizerManager) -> None:
    @app.get("/invented")
    async def invented() -> list[dict[str, Any]]:
        counted = await frontend.ranks.call(CountCall(), 10.0)
        return [{"queued": rank.queued, "launched": rank.launched} for rank in counted]

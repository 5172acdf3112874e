"""Publishes the part of each tensor that each rank uses, and takes updates by these parts."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request

from sglang_inflight.extensions.shards.messages import DescribePartsCall
from sglang_inflight.frontend.frontend import HANDLERS, Frontend
from sglang_inflight.frontend.handlers import Handlers
from sglang_inflight.frontend.http.endpoints import (
    fails_on_shutdown,
    guarded,
    while_connected,
)
from sglang_inflight.frontend.tokenizer_hooks import ROUTES

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager

PATH = "/inflight/plan"


@HANDLERS.join()
def add_handlers(frontend: Frontend, _: TokenizerManager, handlers: Handlers) -> Handlers:
    return handlers.with_more({"update_weights_from_parts": frontend.updates.update})


@ROUTES.join()
def mount(app: FastAPI, frontend: Frontend, _: TokenizerManager) -> None:
    async def describe_plan(request: Request) -> dict[str, Any]:
        """Return each rank's digest and lines; no lines of a digest in the query's ``known``."""
        known = request.query_params.getlist("known")
        call = DescribePartsCall(known=known)
        patience = frontend.settings.update_timeout_s
        answers = await while_connected(request, frontend.ranks.call(call, patience))
        return {
            "ranks": [
                {
                    "rank": each.index,
                    "dp_rank": each.dp_rank,
                    "pp_rank": each.pp_rank,
                    "tp_rank": each.tp_rank,
                    "digest": each.digest,
                    "lines": None if each.lines is None else base64.b64encode(each.lines).decode(),
                }
                for each in sorted(answers, key=lambda each: each.index)
            ]
        }

    router = APIRouter(tags=["inflight"], route_class=fails_on_shutdown(frontend.lifetime))
    endpoint = guarded(describe_plan, takes_request=True)
    router.add_api_route(PATH, endpoint, methods=["GET"])
    app.router.routes[:0] = router.routes

"""SGLang's ``/ready``, with the reason in the body of a 503."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

if TYPE_CHECKING:
    from sglang_inflight.frontend.frontend import Frontend
    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager


def mount(app: FastAPI, frontend: Frontend, tokenizer_manager: PatchedTokenizerManager) -> None:
    """Put the route before SGLang's."""

    async def ready() -> Response:
        """Report whether the server is ready to receive new requests."""
        if tokenizer_manager.is_ready():
            return Response()
        why = frontend.why_not_ready() or "the server is paused, starting, unhealthy or ending"
        return JSONResponse({"message": why}, status_code=503)

    app.router.add_api_route("/ready", ready, methods=["GET"], include_in_schema=False)
    app.router.routes.insert(0, app.router.routes.pop())

"""SGLang's ``/ready``, with the reason in the body of a 503."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

if TYPE_CHECKING:
    from sglang_inflight.frontend.frontend import Frontend
    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager
    from sglang_inflight.sglang_types import TokenizerManager


# SGLang's own reasons, which it does not tell apart
ITS_OWN = "the server is paused, starting, unhealthy or ending"


def mount(app: FastAPI, frontend: Frontend, tokenizer_manager: PatchedTokenizerManager) -> None:
    """Put the route before SGLang's."""

    async def ready() -> Response:
        """Report whether the server is ready to receive new requests."""
        why = why_not_ready(frontend, tokenizer_manager)
        if why is None:
            return Response()
        return JSONResponse({"message": why}, status_code=503)

    app.router.add_api_route("/ready", ready, methods=["GET"], include_in_schema=False)
    app.router.routes.insert(0, app.router.routes.pop())


def why_not_ready(frontend: Frontend, tokenizer_manager: TokenizerManager) -> str | None:
    """Return why the server should get no new request, or None if it is ready."""
    if tokenizer_manager.is_ready():
        return None
    return frontend.why_not_ready() or ITS_OWN

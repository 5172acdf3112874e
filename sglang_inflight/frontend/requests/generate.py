"""The door of SGLang's ``/generate``.

FastAPI parses the body for our route as for SGLang's, and SGLang's own function answers. The checks
come before an answer begins, so a refusal is a 503 for a stream, too. SGLang would begin a stream
with 200 first.
"""

from __future__ import annotations

import logging
from types import ModuleType

from fastapi import FastAPI, Request, Response
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.http.endpoints import refusal
from sglang_inflight.frontend.requests.asked import Asked, read_body
from sglang_inflight.frontend.requests.checks import admit
from sglang_inflight.vocabulary.errors import InflightError

logger = logging.getLogger(__name__)


def mount(app: FastAPI, http_server: ModuleType, frontend: Frontend) -> None:
    """Put our route before SGLang's, which stays the one described in ``/openapi.json``."""

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

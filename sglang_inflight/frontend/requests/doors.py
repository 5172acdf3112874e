"""Let a request of an HTTP route in before the route's answer begins.

So a refusal is a 503 for a stream, too. SGLang would begin a stream with 200 first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.http.answer_versions import AnswerVersions
from sglang_inflight.frontend.http.endpoints import while_connected
from sglang_inflight.frontend.requests.asked import Asked
from sglang_inflight.frontend.requests.checks import admit


async def enter(frontend: Frontend, asked: Asked, request: Any) -> None:
    """Return when the request may go to the schedulers, and let it pass ``gate.py`` at once.

    A wait ends with the caller's connection. Raises the ``InflightError`` of ``admit``.
    """
    is_http = isinstance(request, Request)
    await admit(frontend, asked, functools.partial(while_connected, request) if is_http else None)
    AnswerVersions.of(request).is_let_through = True


async def read_body(request: Any) -> Mapping[str, Any]:
    """Return the fields of an HTTP request's body, parsed and cached by FastAPI.

    gRPC's requests have no body.
    """
    if not isinstance(request, Request):
        return {}
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        return await request.form()
    body = await request.json()
    return body if isinstance(body, Mapping) else {}

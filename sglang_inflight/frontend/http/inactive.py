"""HTTP of a server that runs without us: SGLang's routes answer as in SGLang.

Our own routes answer 501 with the reason. So do calls of SGLang's routes with fields of ours,
because SGLang would silently ignore these fields.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI
from starlette._utils import get_route_path
from starlette.middleware import Middleware
from starlette.types import Message, Receive, Scope, Send

from sglang_inflight.frontend.as_sglang import our_fields
from sglang_inflight.frontend.http.endpoints import Content, guarded, refusal
from sglang_inflight.vocabulary.answers import Inactive
from sglang_inflight.vocabulary.bodies import Body
from sglang_inflight.vocabulary.calls import TABLE
from sglang_inflight.vocabulary.errors import NotOffered

_ROUTES = [(call.path, call) for call in TABLE.values() if call.path is not None]
# routes of ours, missing in SGLang
ROUTES = tuple(
    (path, call.method)
    for path, call in _ROUTES
    if call.body.sglang is None and call.name != "inflight_status"
)
# routes of SGLang, with fields of ours in their bodies
BODIES = {
    path: call.body
    for path, call in _ROUTES
    if call.body.sglang is not None and our_fields(call.body)
}


def mount(app: FastAPI, why: str) -> None:
    """Answer ``why`` on our routes, and to bodies with our fields."""

    async def status() -> Content:
        return Inactive(message=why)

    async def refuse() -> Content:
        raise NotOffered(why)

    router = APIRouter(tags=["inflight"])
    router.add_api_route("/inflight/status", guarded(status), methods=["GET"])
    for path, method in ROUTES:
        router.add_api_route(path, guarded(refuse), methods=[method], include_in_schema=False)
    app.router.routes[:0] = router.routes
    # the last middleware is the innermost: behind the check of API keys
    app.user_middleware.append(Middleware(RefuseOurFields, why=why))


class RefuseOurFields:
    """ASGI middleware: refuse bodies with a field of ours. Null and default values pass."""

    def __init__(self, app: Any, *, why: str) -> None:
        self._app = app
        self._why = why

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shape = BODIES.get(get_route_path(scope)) if scope["type"] == "http" else None
        if shape is None:
            await self._app(scope, receive, send)
            return
        messages = await _whole_body(receive)
        named = find_our_fields(b"".join(m.get("body", b"") for m in messages), shape)
        if named:
            error = NotOffered(f"{', '.join(named)}: {self._why}")
            await refusal(error)(scope, receive, send)
            return
        messages.reverse()

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)


def find_our_fields(content: bytes, shape: type[Body]) -> list[str]:
    """Return our fields set to a non-default value in the body."""
    defaults = our_fields(shape)
    # decoding skips all other fields, which may hold whole tensors
    ours = msgspec.defstruct("_Ours", [(name, Any, msgspec.UNSET) for name in defaults])
    try:
        given = msgspec.json.decode(content or b"{}", type=ours)
    except (msgspec.DecodeError, RecursionError):
        # SGLang reports the malformed body
        return []
    nothing = (None, msgspec.UNSET)
    return [
        name
        for name, default in defaults.items()
        if (value := getattr(given, name)) not in nothing and value != default
    ]


async def _whole_body(receive: Receive) -> list[Message]:
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages

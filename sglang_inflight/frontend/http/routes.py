"""HTTP routes, one for each row of ``vocabulary/calls.py`` with a path."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from sglang_inflight.frontend.as_sglang import decode, group_named_in
from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.handlers import Handler, Handlers
from sglang_inflight.frontend.http.answer_versions import AnswerHeaders
from sglang_inflight.frontend.http.endpoints import (
    Content,
    Endpoint,
    fails_on_shutdown,
    guarded,
    no_piece,
    refusal,
    while_connected,
    with_adapter,
    with_body,
    with_payloads,
    with_query,
    without_body,
)
from sglang_inflight.frontend.http.refused_fields import RefuseFields
from sglang_inflight.frontend.requests.contracts import REFUSED as CONTRACTS_REFUSED
from sglang_inflight.frontend.requests.contracts import not_taken
from sglang_inflight.vocabulary.answers import Begun, Grant
from sglang_inflight.vocabulary.bodies import (
    AbortUpdateBody,
    BeginBody,
    Body,
    DistributedBody,
    LoadAdapterBody,
    PauseBody,
    TensorBody,
    UnloadAdapterBody,
    UpdateBody,
)
from sglang_inflight.vocabulary.calls import TABLE, Call
from sglang_inflight.vocabulary.contracts import Contract
from sglang_inflight.vocabulary.errors import InflightError, Refused

logger = logging.getLogger(__name__)

# tag of our routes in ``/openapi.json``
TAG = "inflight"

# messages of calls without a result
_DONE = {
    "abort_weight_update": "The session was dropped.",
    "init_weights_update_group": "Succeeded to initialize custom process group.",
    "destroy_weights_update_group": "Succeeded to destroy custom process group.",
    "discard_saved_weights": "The saved weights are deleted.",
    "withdraw_served_weights": "The offer has ended.",
}
# names of operations in ``/openapi.json`` and in the log, where the handler has another name
_OPERATIONS = {
    "update_weights_from_distributed": "update_from_distributed",
    "init_weights_update_group": "join_group",
    "destroy_weights_update_group": "leave_group",
    "release_memory_occupation": "release_memory",
    "resume_memory_occupation": "resume_memory",
}


GiveBack = Callable[[Any, Any], Awaitable[None]]


def mount(app: FastAPI, frontend: Frontend) -> None:
    """Put our routes before SGLang's routes of the same path."""
    router = APIRouter(tags=[TAG], route_class=fails_on_shutdown(frontend.lifetime))
    for call in TABLE.values():
        if call.path is not None and call.name in frontend.handlers.by_name:
            router.add_api_route(
                call.path,
                endpoint_of(call, frontend),
                methods=[call.method],
                openapi_extra=_describe(call.body) if call.method == "POST" else None,
            )
    ours = {key for route in router.routes for key in _serves(route)}
    for route in app.router.routes:
        if isinstance(route, APIRoute) and _serves(route) <= ours:
            # SGLang's route is shadowed: describe only ours
            route.include_in_schema = False
    app.router.routes[:0] = router.routes
    app.add_exception_handler(InflightError, _refuse)
    # the last middleware is the innermost: behind the ones for API keys and headers
    app.user_middleware += [
        Middleware(AnswerHeaders, label=lambda: frontend.versions.first),
        Middleware(
            RefuseFields, shapes=dict.fromkeys(CONTRACTS_REFUSED, Contract), refuse=not_taken
        ),
    ]


def _serves(route: BaseRoute) -> set[tuple[str, str]]:
    """Return the route's path with each of its methods."""
    if not isinstance(route, APIRoute):
        return set()
    return {(route.path, method) for method in route.methods or ()}


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer an ``InflightError`` raised through one of SGLang's own routes."""
    assert isinstance(error, InflightError)
    logger.warning("%s refused: %s", request.url.path, error)
    return refusal(error)


def _describe(shape: type[Body]) -> dict[str, Any]:
    """Return the schema of a route's body for ``/openapi.json``, from the decoder's type."""
    _, components = msgspec.json.schema_components([shape])
    schema = components[shape.__name__]
    if shape.sglang is not None:
        del schema["additionalProperties"]
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"content": content}}


def endpoint_of(call: Call, frontend: Frontend) -> Endpoint:
    handlers = frontend.handlers
    handle = _in_json(call, handlers[call.name])
    if call.reads_query:
        return with_query(call.body, handle)
    if call.method == "GET":
        return without_body(handle)
    if issubclass(call.body, LoadAdapterBody | UnloadAdapterBody):
        return with_adapter(call.body, handle)
    if issubclass(call.body, TensorBody):
        return with_payloads(handle, handlers.piece)
    if issubclass(call.body, DistributedBody):
        return _with_broadcast(handle, handlers, frontend)
    piece = handlers.piece if issubclass(call.body, UpdateBody) else no_piece
    return with_body(call.body, handle, piece, _give_back(call, handlers, frontend))


def _in_json(call: Call, handler: Handler) -> Handler:
    """Return the handler with a result in JSON, under its name in ``/openapi.json``."""

    async def handle(body: Body) -> Any:
        result = await handler(body)
        if issubclass(call.body, UpdateBody):
            # SGLang's field, always 0
            return {**result, "num_paused_requests": 0}
        if result is None:
            return {"success": True, "message": _DONE[call.name]}
        return {call.name: result} if isinstance(result, bool) else result

    handle.__name__ = _OPERATIONS.get(call.name, handler.__name__)
    return handle


def _with_broadcast(handle: Handler, handlers: Handlers, frontend: Frontend) -> Endpoint:
    """Return an endpoint for broadcasts: a refused body marks its group broken."""

    async def read_and_answer(request: Request) -> Content:
        with handlers.piece() as arrival:
            content = await request.body()
            # the trainer may have begun to broadcast already
            async with frontend.groups.in_step_by_name(group_named_in(content)):
                body = decode(content, DistributedBody)
            arrival.is_whole = True
            return await while_connected(request, handle(body))

    read_and_answer.__name__ = handle.__name__
    return guarded(read_and_answer, takes_request=True)


def _give_back(call: Call, handlers: Handlers, frontend: Frontend) -> GiveBack | None:
    """Return what undoes a call after its caller left.

    A pause or session named by ``new_id`` stays for a retry.
    """

    async def give_back_pause(body: PauseBody, grant: object) -> None:
        if isinstance(grant, Grant) and body.pause_id is None and body.new_id is None:
            await frontend.pauses.give_back(grant.pause_id)

    async def give_back_session(body: BeginBody, begun: object) -> None:
        if isinstance(begun, Begun) and body.session_id is None and body.new_id is None:
            with suppress(Refused):
                abort = AbortUpdateBody(session_id=begun.session_id)
                await handlers["abort_weight_update"](abort)

    undo: dict[str, GiveBack] = {
        "pause_generation": give_back_pause,
        "begin_weight_update": give_back_session,
    }
    return undo.get(call.name)

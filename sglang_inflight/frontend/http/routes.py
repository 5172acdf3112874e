"""HTTP routes: decode a body, call one collaborator, answer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from sglang_inflight.frontend.as_sglang import decode, group_named_in
from sglang_inflight.frontend.frontend import Frontend
from sglang_inflight.frontend.http.adapters import with_adapter
from sglang_inflight.frontend.http.endpoints import (
    Content,
    fails_on_shutdown,
    guarded,
    no_piece,
    refusal,
    while_connected,
    with_body,
    with_payloads,
)
from sglang_inflight.frontend.http.pause_comments import PauseComments
from sglang_inflight.vocabulary.answers import Begun, Grant
from sglang_inflight.vocabulary.bodies import (
    AbortUpdateBody,
    BeginBody,
    Body,
    ContinueBody,
    DiskBody,
    DistributedBody,
    EndBody,
    IPCBody,
    JoinGroupBody,
    LeaveGroupBody,
    LoadFolderBody,
    LoadTensorsBody,
    NameBody,
    PauseBody,
    ReleaseMemoryBody,
    ResumeMemoryBody,
    RollbackBody,
    SealBody,
    TensorBody,
    UnloadAdapterBody,
    UpdateBody,
)
from sglang_inflight.vocabulary.errors import InflightError, Refused

if TYPE_CHECKING:
    from sglang_inflight.frontend.sglang_types.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

# tag of our routes in ``/openapi.json``
TAG = "inflight"

B = TypeVar("B", bound=Body)


def mount(app: FastAPI, frontend: Frontend, tokenizer_manager: TokenizerManager) -> None:
    """Put our routes before SGLang's routes of the same path."""
    routes = _Routes(frontend, tokenizer_manager)
    router = APIRouter(tags=[TAG], route_class=fails_on_shutdown(frontend.lifetime))

    def post(
        path: str,
        shape: type[B],
        handler: Callable[[B], Awaitable[Content]],
        give_back: Callable[[B, Content], Awaitable[None]] | None = None,
    ) -> None:
        piece = frontend.calls.piece if issubclass(shape, UpdateBody) else no_piece
        router.add_api_route(
            path,
            with_body(shape, handler, piece, give_back),
            methods=["POST"],
            openapi_extra=_describe(shape),
        )

    post("/pause_generation", PauseBody, routes.pause, routes.give_back_pause)
    post("/continue_generation", ContinueBody, routes.resume)
    post("/update_weights_from_disk", DiskBody, routes.update)
    router.add_api_route(
        "/update_weights_from_tensor",
        with_payloads(routes.update, frontend.calls.piece),
        methods=["POST"],
        openapi_extra=_describe(TensorBody),
    )
    router.add_api_route(
        "/update_weights_from_distributed",
        guarded(routes.update_from_distributed, takes_request=True),
        methods=["POST"],
        openapi_extra=_describe(DistributedBody),
    )
    post("/update_weights_from_ipc", IPCBody, routes.update)
    post("/begin_weight_update", BeginBody, routes.begin, routes.give_back_session)
    post("/seal_weight_update", SealBody, routes.seal)
    post("/end_weight_update", EndBody, routes.end)
    post("/abort_weight_update", AbortUpdateBody, routes.abort)
    post("/init_weights_update_group", JoinGroupBody, routes.join_group)
    post("/destroy_weights_update_group", LeaveGroupBody, routes.leave_group)
    post("/update_weight_version", NameBody, routes.rename)
    post("/release_memory_occupation", ReleaseMemoryBody, routes.release_memory)
    post("/resume_memory_occupation", ResumeMemoryBody, routes.resume_memory)
    adapters = frontend.adapters
    adapter_routes: list[tuple[str, type[Body], Callable[..., Awaitable[Any]]]] = [
        ("/load_lora_adapter", LoadFolderBody, adapters.load),
        ("/load_lora_adapter_from_tensors", LoadTensorsBody, adapters.load),
        ("/unload_lora_adapter", UnloadAdapterBody, adapters.unload),
    ]
    for path, shape, handler in adapter_routes:
        router.add_api_route(
            path,
            with_adapter(shape, handler),
            methods=["POST"],
            openapi_extra=_describe(shape),
        )
    post("/inflight/rollback", RollbackBody, routes.roll_back)
    # SGLang had this route up to 0.5.22, and trainers call it
    router.add_api_route("/get_weight_version", guarded(routes.weight_version), methods=["GET"])
    router.add_api_route("/is_paused", guarded(routes.is_paused), methods=["GET"])
    router.add_api_route("/inflight/status", guarded(routes.status), methods=["GET"])
    ours = {served for route in router.routes for served in _serves(route)}
    for route in app.router.routes:
        if isinstance(route, APIRoute) and _serves(route) <= ours:
            # SGLang's route is shadowed: describe only ours
            route.include_in_schema = False
    app.router.routes[:0] = router.routes
    app.add_exception_handler(InflightError, _refuse)
    every_s = frontend.settings.sse_comment_s
    if every_s > 0:
        # the last middleware is the innermost: behind the ones for API keys and headers
        comments = Middleware(
            PauseComments,
            mode=frontend.mode,
            every_s=every_s,
            says_why=frontend.settings.sse_comment,
        )
        app.user_middleware.append(comments)


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


class _Routes:
    def __init__(self, frontend: Frontend, tokenizer_manager: TokenizerManager) -> None:
        self._frontend = frontend
        self._tokenizer_manager = tokenizer_manager
        self._calls = frontend.calls

    async def pause(self, body: PauseBody) -> Content:
        return await self._calls.pause(body)

    async def give_back_pause(self, body: PauseBody, grant: Content) -> None:
        """Release a pause after its caller left. A pause named by ``new_id`` stays for a retry."""
        if isinstance(grant, Grant) and body.pause_id is None and body.new_id is None:
            await self._frontend.pauses.give_back(grant.pause_id)

    async def resume(self, body: ContinueBody) -> Content:
        return await self._calls.resume(body)

    async def update(self, body: UpdateBody) -> Content:
        # SGLang's field, always 0
        return {**await self._calls.update(body), "num_paused_requests": 0}

    async def update_from_distributed(self, request: Request) -> Content:
        with self._calls.piece() as arrival:
            content = await request.body()
            # marked broken if the body is bad: the trainer may have begun to broadcast already
            async with self._frontend.groups.in_step_by_name(group_named_in(content)):
                body = decode(content, DistributedBody)
            arrival.is_whole = True
            return await while_connected(request, self.update(body))

    async def begin(self, body: BeginBody) -> Content:
        return await self._calls.begin(body)

    async def give_back_session(self, body: BeginBody, begun: Content) -> None:
        """Drop a session after its caller left. A session named by ``new_id`` stays for a retry."""
        if isinstance(begun, Begun) and body.session_id is None and body.new_id is None:
            with suppress(Refused):
                await self._calls.abort(AbortUpdateBody(session_id=begun.session_id))

    async def seal(self, body: SealBody) -> Content:
        return await self._calls.seal(body)

    async def end(self, body: EndBody) -> Content:
        return await self._calls.end(body)

    async def abort(self, body: AbortUpdateBody) -> Content:
        await self._calls.abort(body)
        return {"success": True, "message": "The session was dropped."}

    async def roll_back(self, body: RollbackBody) -> Content:
        return await self._frontend.updates.roll_back(body)

    async def release_memory(self, body: ReleaseMemoryBody) -> Content:
        return await self._calls.release_memory(body)

    async def resume_memory(self, body: ResumeMemoryBody) -> Content:
        return await self._calls.resume_memory(body)

    async def rename(self, body: NameBody) -> Content:
        return await self._calls.rename(body)

    async def join_group(self, body: JoinGroupBody) -> Content:
        await self._frontend.groups.join(body)
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    async def leave_group(self, body: LeaveGroupBody) -> Content:
        await self._frontend.groups.leave(body)
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    async def status(self) -> Content:
        return await self._frontend.status()

    async def weight_version(self) -> Content:
        return {"weight_version": self._tokenizer_manager.config_value("weight_version")}

    async def is_paused(self) -> Content:
        return {"is_paused": await self._calls.is_paused()}

"""HTTP. Each route decodes, calls one collaborator, and answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import APIRouter, FastAPI, Request

from sglang_inflight.errors import Refused
from sglang_inflight.frontend.bodies import (
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
    PauseBody,
    RollbackBody,
    SealBody,
    TensorBody,
    UpdateBody,
    decode,
    group_named_in,
)
from sglang_inflight.frontend.endpoints import Answer, guarded, with_body
from sglang_inflight.frontend.frontend import Frontend

B = TypeVar("B", bound=Body)


def mount(app: FastAPI, frontend: Frontend) -> None:
    """Put our routes before upstream's of the same path."""
    routes = _Routes(frontend)
    router = APIRouter()

    def post(path: str, shape: type[B], handler: Callable[[B], Awaitable[Answer]]) -> None:
        router.add_api_route(path, with_body(shape, handler), methods=["POST"])

    post("/pause_generation", PauseBody, routes.pause)
    post("/continue_generation", ContinueBody, routes.resume)
    post("/update_weights_from_disk", DiskBody, routes.update)
    post("/update_weights_from_tensor", TensorBody, routes.update)
    router.add_api_route(
        "/update_weights_from_distributed",
        guarded(routes.update_from_distributed, takes_request=True),
        methods=["POST"],
    )
    post("/update_weights_from_ipc", IPCBody, routes.update)
    post("/begin_weight_update", BeginBody, routes.begin)
    post("/seal_weight_update", SealBody, routes.seal)
    post("/end_weight_update", EndBody, routes.end)
    post("/abort_weight_update", AbortUpdateBody, routes.abort)
    post("/init_weights_update_group", JoinGroupBody, routes.join_group)
    post("/destroy_weights_update_group", LeaveGroupBody, routes.leave_group)
    post("/inflight/rollback", RollbackBody, routes.roll_back)
    router.add_api_route("/is_paused", guarded(routes.is_paused), methods=["GET"])
    router.add_api_route("/inflight/status", guarded(routes.status), methods=["GET"])
    app.router.routes[:0] = router.routes


class _Routes:
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._pauses = frontend.pauses
        self._updates = frontend.updates

    async def pause(self, body: PauseBody) -> Answer:
        return await self._pauses.pause(
            body.mode or None,
            pause_id=body.pause_id,
            lease_s=body.lease_s,
            timeout_s=body.timeout_s,
        )

    async def resume(self, body: ContinueBody) -> Answer:
        return await self._pauses.resume(
            pause_id=body.pause_id, torch_empty_cache=body.torch_empty_cache
        )

    async def update(self, body: UpdateBody) -> Answer:
        # upstream's name for a count that it never counted
        return {**await self._updates.update(body), "num_paused_requests": 0}

    async def update_from_distributed(self, request: Request) -> Answer:
        content = await request.body()
        try:
            body = decode(content, DistributedBody)
        except Refused as error:
            # its trainer may have begun to broadcast all the same
            group = group_named_in(content)
            besides = await self._frontend.groups.give_up(group, None, error)
            raise Refused(f"{error}{besides}") from error
        return await self.update(body)

    async def begin(self, body: BeginBody) -> Answer:
        return await self._updates.begin(body)

    async def seal(self, body: SealBody) -> Answer:
        return await self._updates.seal(body)

    async def end(self, body: EndBody) -> Answer:
        return await self._updates.end(body)

    async def abort(self, body: AbortUpdateBody) -> Answer:
        await self._updates.abort(body)
        return {"success": True, "message": "The session was dropped."}

    async def roll_back(self, body: RollbackBody) -> Answer:
        return await self._updates.roll_back(body)

    async def join_group(self, body: JoinGroupBody) -> Answer:
        await self._frontend.groups.join(body)
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    async def leave_group(self, body: LeaveGroupBody) -> Answer:
        await self._frontend.groups.leave(body)
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    async def status(self) -> Answer:
        return await self._frontend.status()

    async def is_paused(self) -> Answer:
        return {"is_paused": await self._pauses.is_paused()}

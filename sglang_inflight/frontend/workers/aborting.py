"""An abort by name, where any of several workers may have the request.

SGLang's worker hands a name that it does not know to the schedulers, which end whatever they have
of that name when the message arrives: perhaps a later request than the one that was meant, and no
request of a group, whose name the schedulers do not know. Here the worker that has a request ends
it (``StateBroadcast.abort``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import msgspec
from fastapi import FastAPI, Request, Response
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.utils.auth import AuthLevel, auth_level
from starlette.routing import Route

from sglang_inflight.errors import InflightError, OutcomeUnknown
from sglang_inflight.frontend.bodies import Body, decode
from sglang_inflight.frontend.http.endpoints import refusal
from sglang_inflight.frontend.workers.forward import owners_client

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager
    from sglang_inflight.frontend.workers.state_broadcast import StateBroadcast

# SGLang's, of which a worker's app has its own form
_PATH = "/abort_request"
# on the owner's socket alone
_OWNERS_PATH = "/inflight/abort_requests"


class AbortBody(Body, kw_only=True):
    sglang = AbortReq

    rid: str | None = None
    abort_all: bool = False


async def abort(calls: Path, names: list[str]) -> int:
    """In a worker. When it returns, the schedulers have been told. Returns how many are ended."""
    try:
        async with owners_client(calls) as client:
            response = await client.post(
                f"http://owner{_OWNERS_PATH}", content=msgspec.json.encode(names)
            )
            response.raise_for_status()
    except httpx.HTTPError as error:
        raise OutcomeUnknown(f"the process that owns the server's state: {error!r}") from error
    return msgspec.json.decode(response.content, type=int)


def mount_in_worker(app: FastAPI, tokenizer_manager: PatchedTokenizerManager) -> None:
    """Before SGLang's route. Answers as it does: 200 and no content, whatever has the name."""

    async def abort_request(request: Request) -> Response:
        try:
            body = decode(await request.body(), AbortBody)
            if body.abort_all:
                tokenizer_manager.abort_request(abort_all=True)
            elif body.rid:
                await tokenizer_manager.inflight.aborts.everywhere([body.rid])
        except InflightError as error:
            return refusal(error)
        return Response()

    endpoint = auth_level(AuthLevel.ADMIN_OPTIONAL)(abort_request)
    app.router.routes.insert(0, Route(_PATH, endpoint, methods=["POST"], include_in_schema=False))


def mount(app: FastAPI, broadcast: StateBroadcast) -> None:
    """In the owner."""

    async def end(request: Request) -> Response:
        names = msgspec.json.decode(await request.body(), type=list[str])
        content = msgspec.json.encode(await broadcast.abort(names))
        return Response(content, media_type="application/json")

    app.router.add_api_route(_OWNERS_PATH, end, methods=["POST"])

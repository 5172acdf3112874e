"""Abort a request by name when any of several tokenizer workers may have it.

SGLang's worker forwards an unknown name to the schedulers. The schedulers end the request of that
name at the message's arrival, perhaps a later one than meant. The schedulers cannot end the
requests of a group, because they do not know a group's name. Here a request's own worker ends the
request (``StateBroadcast.abort``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import msgspec
from fastapi import FastAPI, Request, Response
from sglang.srt.utils.auth import AuthLevel, auth_level
from starlette.routing import Route

from sglang_inflight.frontend.as_sglang import decode
from sglang_inflight.frontend.http.endpoints import refusal
from sglang_inflight.frontend.workers.forward import owners_client
from sglang_inflight.vocabulary.bodies import Body
from sglang_inflight.vocabulary.errors import InflightError, OutcomeUnknown

if TYPE_CHECKING:
    from sglang_inflight.frontend.patched_types import PatchedTokenizerManager
    from sglang_inflight.frontend.workers.state_broadcast import StateBroadcast

# SGLang's route, replaced in a worker's app
_PATH = "/abort_request"
# only on the owner's socket
_OWNERS_PATH = "/inflight/abort_requests"


class AbortBody(Body, kw_only=True):
    sglang = "AbortReq"

    rid: str | None = None
    abort_all: bool = False


async def abort(calls: Path, names: list[str]) -> int:
    """Ask the owner, from a worker, to abort ``names``. Return the number of aborted requests.

    The schedulers have the aborts by the time of the return.
    """
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
    """Put our route before SGLang's. Both always answer 200 without content."""

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
    """Mount the owner's route for workers' aborts."""

    async def end(request: Request) -> Response:
        names = msgspec.json.decode(await request.body(), type=list[str])
        content = msgspec.json.encode(await broadcast.abort(names))
        return Response(content, media_type="application/json")

    app.router.add_api_route(_OWNERS_PATH, end, methods=["POST"])

"""The front's routes. A request for tokens goes to one server after the other, until it is whole.

Control calls (updates, pauses, memory) belong to the servers: a ``Fleet`` makes them on all or on
none. The front answers 404 to them, and says so.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sglang_inflight.client.aio import together
from sglang_inflight.client.answers import Json
from sglang_inflight.client.async_client import AsyncClient
from sglang_inflight.client.rollouts.rollouts import Rollouts
from sglang_inflight.extensions.front.relay import CHAT, COMPLETIONS, GENERATE, Relay
from sglang_inflight.extensions.front.watch import Watch, describe_server
from sglang_inflight.extensions.front.whole import Whole
from sglang_inflight.vocabulary.errors import InflightError

logger = logging.getLogger(__name__)

RELAYED = (COMPLETIONS, CHAT, GENERATE)
# questions that any server answers for all
QUESTIONS = (
    "/v1/models",
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
    "/get_weight_version",
)
_UNAVAILABLE = 503
_PAGE = Path(__file__).with_name("page.html")


def make_app(urls: Sequence[str], api_key: str | None = None) -> Starlette:
    """Return an app in front of the servers at ``urls``, which have the same ``api_key``."""
    front = _Front()

    @asynccontextmanager
    async def live(_: Starlette) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncClient(url, api_key=api_key)) for url in urls
            ]
            front.open(clients)
            yield

    routes = [
        Route("/generate", front.generate, methods=["POST", "PUT"]),
        *(Route(path, front.relay, methods=["POST"]) for path in RELAYED),
        *(Route(path, front.ask_any, methods=["GET"]) for path in QUESTIONS),
        Route("/abort_request", front.ask_all, methods=["POST"]),
        Route("/health", front.health, methods=["GET"]),
        Route("/ready", front.ready, methods=["GET"]),
        Route("/", front.page, methods=["GET"]),
        Route("/inflight/fleet", front.fleet, methods=["GET"]),
        Route("/metrics", front.metrics, methods=["GET"]),
        Route("/{path:path}", front.elsewhere, methods=["GET", "POST", "PUT", "DELETE"]),
    ]
    return Starlette(routes=routes, lifespan=live)


class _Front:
    """Answers requests. Lives on the server's event loop."""

    def open(self, clients: Sequence[AsyncClient]) -> None:
        self._clients = clients
        self._watch = Watch()
        self._rollouts = Rollouts(clients, tuple, watcher=self._watch)
        self._places = self._rollouts.servers.places
        self._watch.watch(self._places.values())

    async def generate(self, request: Request) -> Response:
        body = await _read(request)
        if isinstance(body, Response):
            return body
        if body.get("stream"):
            return _stream(lambda: self._rollouts.stream(body))
        try:
            return JSONResponse(await self._rollouts.generate(body))
        except InflightError as error:
            return _refuse(error)

    async def relay(self, request: Request) -> Response:
        body, path = await _read(request), request.url.path
        if isinstance(body, Response):
            return body
        if body.get("stream"):
            return _stream(lambda: self._rollouts.run(Relay(path, body), streams=True))
        try:
            async with aclosing(self._rollouts.run(Whole(path, body), streams=False)) as answers:
                return JSONResponse(await anext(answers))
        except InflightError as error:
            return _refuse(error)

    async def ask_any(self, request: Request) -> Response:
        """Pass the answer of the first server that gives one."""
        said = "no server answers"
        for client in self._clients:
            try:
                async with client.streamed(request.url.path, None, method="GET") as response:
                    content = await response.aread()
            except httpx.HTTPError as error:
                said = f"{client.url}: {error or type(error).__name__}"
                continue
            return Response(content, response.status_code, media_type="application/json")
        return JSONResponse({"error": {"message": said}}, _UNAVAILABLE)

    async def ask_all(self, request: Request) -> Response:
        body = await _read(request)
        if isinstance(body, Response):
            return body

        async def ask(client: AsyncClient) -> None:
            try:
                async with client.streamed(request.url.path, body) as response:
                    await response.aread()
            except httpx.HTTPError as error:
                logger.warning("%s did not get %s: %s", client.url, request.url.path, error)

        await together(ask(client) for client in self._clients)
        return Response()

    async def health(self, _: Request) -> Response:
        return Response()

    async def ready(self, _: Request) -> Response:
        """Answer 200 if a server takes requests, else 503 with each server's reason."""
        await self._rollouts.servers.look()
        whys = {url: place.why_not for url, place in self._places.items()}
        if None in whys.values():
            return Response()
        return JSONResponse({"message": json.dumps(whys)}, _UNAVAILABLE)

    async def page(self, _: Request) -> Response:
        return FileResponse(_PAGE)

    async def fleet(self, _: Request) -> Response:
        """Answer each server's state, and counts of rollouts: what the page shows."""
        await self._rollouts.servers.look()
        servers = [describe_server(place) for place in self._places.values()]
        return JSONResponse({"servers": servers, "rollouts": self._watch.describe()})

    async def metrics(self, _: Request) -> Response:
        await self._rollouts.servers.look()
        text = generate_latest(self._watch.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def elsewhere(self, request: Request) -> Response:
        said = (
            f"{request.url.path} is not served here: make control calls at the servers, by "
            "sglang_inflight.client.Fleet"
        )
        return JSONResponse({"error": {"message": said, "type": "NotFound"}}, 404)


async def _read(request: Request) -> Json | Response:
    """Return the body, or a 400 if it is no JSON object."""
    try:
        body = json.loads(await request.body())
    except ValueError as error:
        return JSONResponse({"error": {"message": f"the body is no JSON: {error}"}}, 400)
    if not isinstance(body, dict):
        return JSONResponse({"error": {"message": "the body must be a JSON object"}}, 400)
    return body


def _refuse(error: InflightError) -> Response:
    return JSONResponse({"error": _describe(error)}, error.status)


def _describe(error: InflightError) -> Json:
    return {"message": str(error), "type": type(error).__name__, "code": error.status}


def _stream(make: Callable[[], AsyncGenerator[Json]]) -> Response:
    async def events() -> AsyncGenerator[bytes]:
        async with aclosing(make()) as answers:
            try:
                async for answer in answers:
                    yield _event(answer)
            except InflightError as error:
                yield _event({"error": _describe(error)})
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _event(content: Any) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"

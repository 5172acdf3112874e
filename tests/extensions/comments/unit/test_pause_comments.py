"""The answer after a pause comment began it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from sglang_inflight.extensions.comments.pause_comments import PauseComments

EVERY_S = 0.01
PATIENCE_S = 60.0
COMMENT = ": paused mode=in_place"


class Paused:
    """A pause of ``times`` polls. ``ended`` is set at its end."""

    def __init__(self, times: int = 3) -> None:
        self._left = times
        self.ended = asyncio.Event()

    async def mode(self) -> str | None:
        self._left -= 1
        if self._left < 0:
            self.ended.set()
            return None
        return "in_place"


async def ask(
    answer: Any, paused: Paused, body: Any = None, *, root_path: str = "", says_why: bool = True
) -> httpx.Response:
    async def endpoint(request: Request) -> Response:
        await request.body()
        response: Response = await answer(paused)
        return response

    app = Starlette(routes=[Route("/generate", endpoint, methods=["POST"])])
    wrapped = PauseComments(app, mode=paused.mode, every_s=EVERY_S, says_why=says_why)
    transport = httpx.ASGITransport(app=wrapped, root_path=root_path)
    client = httpx.AsyncClient(transport=transport, base_url="http://test")
    async with asyncio.timeout(PATIENCE_S), client:
        asked = {"stream": True} if body is None else body
        # servers pass the path with its prefix
        return await client.post(f"{root_path}/generate", json=asked)


def lines_of(response: httpx.Response) -> list[str]:
    return [line for line in response.text.splitlines() if line]


@pytest.mark.parametrize(
    ("late", "event"),
    [
        (JSONResponse({"message": "full", "code": 503}, 503), {"message": "full", "code": 503}),
        (JSONResponse({"error": {"message": "full"}}, 503), {"message": "full"}),
        (PlainTextResponse("full\nvery", 500), {"message": "full\nvery"}),
    ],
    ids=["OpenAI's", "SGLang's", "text"],
)
def test_error_after_a_comment_is_an_event(late: Response, event: dict[str, Any]) -> None:
    async def answer(paused: Paused) -> Response:
        await paused.ended.wait()
        return late

    response = asyncio.run(ask(answer, Paused()))
    assert response.status_code == 200
    *comments, error, done = lines_of(response)
    assert comments == [COMMENT] * 3
    assert json.loads(error.removeprefix("data: ")) == {"error": event}
    assert done == "data: [DONE]"


def test_comments_without_reason_are_empty_lines() -> None:
    """Readers that parse every other line as JSON skip an empty line."""

    async def answer(paused: Paused) -> Response:
        async def events() -> AsyncIterator[str]:
            yield "data: {}\n\n"
            await paused.ended.wait()
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    response = asyncio.run(ask(answer, Paused(), says_why=False))
    assert response.text == "data: {}\n\n" + "\n" * 3 + "data: [DONE]\n\n"


def test_pause_comments_work_behind_a_path_prefix() -> None:
    async def answer(paused: Paused) -> Response:
        await paused.ended.wait()
        return JSONResponse({"message": "full"}, 503)

    response = asyncio.run(ask(answer, Paused(), root_path="/api"))
    assert lines_of(response)[0] == COMMENT


@pytest.mark.parametrize("body", [{"stream": False}, {}, {"stream": "yes"}, [1]])
def test_unstreamed_request_gets_no_comments(body: Any) -> None:
    async def answer(paused: Paused) -> Response:
        await paused.ended.wait()
        return JSONResponse({"message": "full"}, 503)

    response = asyncio.run(ask(answer, Paused(), body))
    assert (response.status_code, response.json()) == (503, {"message": "full"})


def test_comment_does_not_split_an_event() -> None:
    async def answer(paused: Paused) -> Response:
        async def events() -> AsyncIterator[str]:
            yield "data: begun "
            await paused.ended.wait()
            yield "and ended\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    response = asyncio.run(ask(answer, Paused()))
    assert lines_of(response) == ["data: begun and ended", "data: [DONE]"]

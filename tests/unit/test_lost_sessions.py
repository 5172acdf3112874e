"""A session opened by SGLang's own calls loses a piece.

Its client may send the rest and end the session regardless: NeMo-RL ends its session in
``finally``. No part goes live, neither at the end nor piece by piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request
from starlette.requests import ClientDisconnect

from sglang_inflight.frontend.http import endpoints
from sglang_inflight.frontend.http.endpoints import with_body, with_payloads
from sglang_inflight.frontend.http.routes import endpoint_of
from sglang_inflight.vocabulary.bodies import (
    AbortUpdateBody,
    BeginBody,
    DiskBody,
    EndBody,
    IPCBody,
    TensorBody,
)
from sglang_inflight.vocabulary.calls import TABLE
from sglang_inflight.vocabulary.errors import Conflict, Dropped
from tests.support.front_end import SETTINGS, FrontEnd
from tests.support.front_end import no_arguments as no_arguments
from tests.support.ticks import run, tick, until_idle

PIECE = TensorBody(serialized_named_tensors=[b""], weight_version="v1")

pytestmark = pytest.mark.usefixtures("no_arguments")


def arriving(content: bytes, *, is_whole: bool) -> Request:
    messages = [{"type": "http.request", "body": content, "more_body": not is_whole}]

    async def receive() -> Any:
        return messages.pop() if messages else {"type": "http.disconnect"}

    return Request({"type": "http", "headers": [], "path": "/"}, receive)


async def cut_off_tensors(front: FrontEnd) -> None:
    with pytest.raises(ClientDisconnect):
        await with_payloads(front.call, front.handlers.piece)(arriving(b"{", is_whole=False))


async def cut_off_broadcast(front: FrontEnd) -> None:
    frontend: Any = SimpleNamespace(handlers=front.handlers, groups=front.groups)
    endpoint = endpoint_of(TABLE["update_weights_from_distributed"], frontend)
    with pytest.raises(ClientDisconnect):
        await endpoint(arriving(b"{", is_whole=False))


async def unreadable(front: FrontEnd) -> None:
    endpoint = with_body(IPCBody, front.call, front.handlers.piece)
    answer = await endpoint(arriving(b'{"zmq_handles": 1}', is_whole=True))
    assert answer.status_code == 400


async def left(front: FrontEnd) -> None:
    piece = asyncio.ensure_future(front.call(PIECE))
    await tick(3)
    piece.cancel()
    await asyncio.wait({piece})


async def lapsed(front: FrontEnd) -> None:
    assert front.two_phase.current is not None
    front.two_phase.expire(front.two_phase.current)


LOSSES: dict[str, Callable[[FrontEnd], Awaitable[None]]] = {
    each.__name__: each for each in (cut_off_tensors, cut_off_broadcast, unreadable, left, lapsed)
}


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "get_parallel", lambda: SimpleNamespace(nnodes=1))


async def session_with_lost_piece(loss: str) -> FrontEnd:
    front = FrontEnd(delay=1)
    await front.call(BeginBody())
    await front.call(PIECE)
    await LOSSES[loss](front)
    await until_idle()
    return front


@pytest.mark.parametrize("loss", LOSSES)
def test_session_with_lost_piece_goes_live_in_no_part(loss: str) -> None:
    async def play() -> None:
        front = await session_with_lost_piece(loss)
        for _ in range(2):
            with pytest.raises(Dropped, match="this call's weight-update session was dropped"):
                await front.call(PIECE)
        with pytest.raises(
            Dropped, match=r"no weight-update session is open: .* nothing of it is served"
        ):
            await front.call(EndBody())
        assert (front.rank.epoch, front.rank.update_id) == (0, None)
        # the client was told of the loss, so a later piece is an update of its own
        await front.call(PIECE)
        assert front.rank.version == "v1"

    run(play())


@pytest.mark.parametrize("ends", ["begin", "abort"])
def test_lost_session_is_over_after_begin_or_abort(ends: str) -> None:
    async def play() -> None:
        front = await session_with_lost_piece("left")
        if ends == "begin":
            await front.call(BeginBody())
            await front.call(PIECE)
            receipt = await front.call(EndBody())
            assert receipt["weight_version"] == "v1"
        else:
            await front.call(AbortUpdateBody())
            await front.call(PIECE)
        assert front.rank.version == "v1"

    run(play())


def test_lost_session_of_dead_client_expires() -> None:
    async def play() -> None:
        front = await session_with_lost_piece("left")
        session = front.updates._last
        assert session is not None
        session.dropped_at -= SETTINGS.update_timeout_s
        await front.call(PIECE)
        assert front.rank.version == "v1"

    run(play())


def test_disk_update_after_a_lost_session_succeeds() -> None:
    async def play() -> None:
        front = await session_with_lost_piece("left")
        disk = DiskBody(model_path="/v2", weight_version="v2")
        assert (await front.call(disk))["weight_version"] == "v2"

    run(play())


def test_failed_call_beside_a_session_keeps_it_open() -> None:
    """Calls for another session, and calls that refuse to wait for this session."""

    async def play() -> None:
        front = FrontEnd(delay=1)
        await front.call(BeginBody())
        await front.call(PIECE)
        for other in (
            DiskBody(model_path="/v2", session_id="another"),
            DiskBody(model_path="/v2", on_busy="refuse"),
        ):
            with pytest.raises(Conflict):
                await front.call(other)
        receipt = await front.call(EndBody())
        assert receipt["weight_version"] == "v1"

    run(play())


def test_unreadable_piece_keeps_named_session() -> None:
    async def play() -> None:
        front = FrontEnd(delay=1)
        begun = await front.call(BeginBody(non_blocking=True))
        await unreadable(front)
        await until_idle()
        assert front.two_phase.current is not None
        await front.call(EndBody(session_id=begun["session_id"], non_blocking=True))

    run(play())

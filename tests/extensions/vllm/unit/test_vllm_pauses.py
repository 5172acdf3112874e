"""vLLM's ``/pause`` and ``/sleep``: a failure after the grant releases their pause."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient

from sglang_inflight.extensions.vllm.bodies import PauseQuery, SleepQuery
from sglang_inflight.extensions.vllm.caches import Caches
from sglang_inflight.extensions.vllm.routes import VLLMS_NAMES, _Routes
from sglang_inflight.frontend.aio import Lifetime
from sglang_inflight.frontend.http.endpoints import fails_on_shutdown, guarded
from sglang_inflight.vocabulary.answers import MemoryMoved
from sglang_inflight.vocabulary.calls import TABLE
from sglang_inflight.vocabulary.errors import Conflict, OutcomeUnknown
from tests.support.ticks import run, until_idle
from tests.unit.fakes import ALL, PausingRank, pauses_of


class WorkAfterGrant:
    """The work after the grant, in progress until the test fails it."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.fails: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Played:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = PausingRank()
        self.work = WorkAfterGrant()
        pauses = pauses_of(self.rank)

        async def wait(*_: object, **__: object) -> MemoryMoved:
            self.work.begun.set()
            await self.work.fails
            raise AssertionError

        async def released() -> list[str]:
            return []

        monkeypatch.setattr(Caches, "flush", wait)
        frontend: Any = SimpleNamespace(
            ranks=self.rank,
            pauses=pauses,
            can=ALL,
            updates=None,
            groups=None,
            part=lambda _: SimpleNamespace(release=wait, released=released),
            settings=SimpleNamespace(update_timeout_s=1.0),
        )
        self.routes = _Routes(frontend, pauses._tokenizer_manager)

    async def begin(self, call: Awaitable[Any]) -> asyncio.Future[Any]:
        """Run a call to the middle of its work after the grant."""
        calling = asyncio.ensure_future(call)
        while not self.work.begun.is_set():
            assert not calling.done(), calling
            self.rank.step()
            await until_idle()
        assert self.rank.held
        return calling

    async def finish(self, call: asyncio.Future[Any]) -> None:
        while not call.done():
            self.rank.step()
            await until_idle()


CALLS: dict[str, Callable[[_Routes], Awaitable[Any]]] = {
    "/pause": lambda routes: routes.pause(PauseQuery(mode="keep", clear_cache=True)),
    "/sleep": lambda routes: routes.sleep(SleepQuery(level=1)),
}


@pytest.fixture(autouse=True)
def one_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(device="cpu")
    monkeypatch.setattr("sglang_inflight.extensions.vllm.routes.get_device", lambda: device)


@pytest.mark.parametrize("path", CALLS)
def test_cancel_after_the_grant_releases_pause(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        played = Played(monkeypatch)
        call = await played.begin(CALLS[path](played.routes))
        call.cancel()
        await played.finish(call)
        assert call.cancelled()
        assert played.rank.held == []

    run(play())


@pytest.mark.parametrize("error", [OutcomeUnknown("a rank is silent"), Conflict("no"), OSError()])
@pytest.mark.parametrize("path", CALLS)
def test_error_after_the_grant_releases_pause(
    path: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        played = Played(monkeypatch)
        call = await played.begin(CALLS[path](played.routes))
        played.work.fails.set_exception(error)
        await played.finish(call)
        assert call.exception() is error
        assert played.rank.held == []

    run(play())


def test_refusal_names_the_calls_of_its_own_client() -> None:
    """Ranks and the front end name SGLang's calls."""
    manager: Any = SimpleNamespace(event_loop=None)
    why = "weights are released. resume_memory_occupation brings it back, end_weight_update not"

    async def refuse() -> Any:
        raise Conflict(why)

    app = FastAPI()
    for prefix, names in (("/vllm", {"names": VLLMS_NAMES}), ("/sglang", {})):
        router = APIRouter(prefix=prefix, route_class=fails_on_shutdown(Lifetime(manager), **names))
        router.add_api_route("/call", guarded(refuse), methods=["POST"])
        app.include_router(router)
    with TestClient(app) as client:
        vllms, sglangs = (client.post(f"{path}/call").json() for path in ("/vllm", "/sglang"))
    assert sglangs["message"] == why
    said = "weights are released. /wake_up brings it back, /finish_weight_update not"
    assert vllms["message"] == vllms["error"]["message"] == said


def test_every_call_named_for_vllm_is_a_call_of_ours() -> None:
    assert set(VLLMS_NAMES) <= set(TABLE)

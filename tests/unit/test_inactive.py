"""A server without us: its processes know, and our fields are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from sglang_inflight import inactive
from sglang_inflight.frontend.http.inactive import BODIES, ROUTES, mount
from sglang_inflight.frontend.http.refused_fields import find_our_fields
from sglang_inflight.hooking import AFTER, AROUND, BEFORE, REPLACE, _as_called, with_us
from sglang_inflight.settings import Settings
from sglang_inflight.unsupported import why_refused
from sglang_inflight.vocabulary.bodies import DiskBody, PauseBody
from sglang_inflight.vocabulary.calls import TABLE

WHY = "it asks for what we cannot do"


@pytest.fixture(autouse=True)
def no_server_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the record of launched servers before and after each test."""
    monkeypatch.setattr(inactive, "_why", None)


def test_only_children_of_the_launch_are_inactive() -> None:
    with inactive.launching(WHY):
        assert inactive.is_child_of_inactive()
        # a child loading us must not refuse the variable as an unknown setting
        Settings.from_environment()
    assert (inactive.is_child_of_inactive(), inactive.why_inactive()) == (False, WHY)
    with inactive.launching(None):
        assert not inactive.is_child_of_inactive()
    assert inactive.why_inactive() is None


def test_failed_launch_leaves_no_variable() -> None:
    with pytest.raises(RuntimeError), inactive.launching(WHY):
        raise RuntimeError
    assert inactive.VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("off", "in_fork", "words"),
    [(False, False, "=off starts it"), (False, True, "=off starts it"), (True, True, "fork")],
)
def test_refusal_names_setting_or_fork(off: bool, in_fork: bool, words: str) -> None:
    refusal = why_refused(WHY, off=off, in_fork=in_fork)
    assert refusal is not None
    assert refusal.startswith(WHY)
    assert words in refusal


def test_unsupported_server_starts_when_allowed() -> None:
    assert why_refused(WHY, off=True, in_fork=False) is None


class _Manager:
    def say(self, word: str) -> str:
        return f"SGLang {word}"


class _Engine:
    def __init__(self, manager: _Manager) -> None:
        self.tokenizer_manager = manager


def test_hooks_skip_objects_without_frontend() -> None:
    called: list[Any] = []

    def ours(*args: Any) -> str:
        called.append(args)
        return "ours"

    with_frontend, other = _Manager(), _Manager()
    with_frontend.inflight = object()  # type: ignore[attr-defined]
    say = _Manager.say
    replace, wrap, before, after = (
        _as_called(ours, kind, None, with_us)[0] for kind in (REPLACE, AROUND, BEFORE, AFTER)
    )
    for owner, is_ours in ((with_frontend, True), (other, False), (_Engine(with_frontend), True)):
        called.clear()
        answers = {replace(say, owner, "so"), wrap(say, owner, "so")}
        assert answers == ({"ours"} if is_ours else {"SGLang so"})
        before(owner, "so")
        after("result", owner, "so")
        assert called == (
            [(owner, "so"), (say, owner, "so"), (owner, "so"), ("result", owner, "so")]
            if is_ours
            else []
        )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"model_path": "/x", "flush_cache": False}, []),
        (
            {"model_path": "/x", "non_blocking": True, "on_busy": "refuse"},
            ["non_blocking", "on_busy"],
        ),
        # our fields at their defaults ask for nothing, and SGLang ignores them
        ({"model_path": "/x", "non_blocking": False, "partial": None, "kv_cache": None}, []),
        ({"model_path": "/x", "unknown": 1}, []),
        ([], []),
    ],
)
def test_our_non_default_fields_are_found(given: Any, named: list[str]) -> None:
    assert find_our_fields(msgspec.json.encode(given), DiskBody) == named


@pytest.mark.parametrize("content", [b"", b"no JSON", b"[" * 100_000])
def test_unreadable_body_is_left_to_sglang(content: bytes) -> None:
    assert find_our_fields(content, PauseBody) == []


def test_inactive_server_knows_every_route() -> None:
    """The other routes' bodies have only SGLang's own fields."""
    paths = {call.path for call in TABLE.values()} - {None}
    known = {*BODIES, *(path for path, _ in ROUTES), "/inflight/status"}
    assert paths - known == {
        "/init_weights_update_group", "/destroy_weights_update_group", "/update_weight_version",
        "/resume_memory_occupation",
    }  # fmt: skip
    assert known <= paths


@pytest.mark.parametrize("root_path", ["", "/api"])
def test_inactive_server_refuses_our_fields_over_http(root_path: str) -> None:
    app = FastAPI()

    @app.post("/pause_generation")
    async def pause(request: Request) -> Any:
        return await request.json()

    mount(app, WHY)
    client = TestClient(app, base_url=f"http://test{root_path}", root_path=root_path)
    assert client.get("/inflight/status").json() == {"active": False, "message": WHY}

    def chunks(body: dict[str, Any]) -> Iterator[bytes]:
        content = msgspec.json.encode(body)
        yield from (content[:5], b"", content[5:])

    plain = {"mode": "in_place", "lease_s": None}
    assert client.post("/pause_generation", content=chunks(plain)).json() == plain
    for path, body in (
        ("/pause_generation", {**plain, "lease_s": 5}),
        ("/inflight/rollback", {}),
        ("/seal_weight_update", {}),
    ):
        refused = client.post(path, content=chunks(body))
        assert (refused.status_code, WHY in refused.json()["message"]) == (501, True)

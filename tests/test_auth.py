"""Each of our routes needs the admin key, if the server has one."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from harness.server import Server
from tests.support.pool import FLAVOURS, Flavour, ServerPool
from tests.support.routes import routes

USER, ADMIN = "user-key", "admin-key"
REDACTED = "<redacted>"
FLAVOURS["keyed_server"] = Flavour(
    ("--weight-version", "v0", "--api-key", USER, "--admin-api-key", ADMIN)
)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


Headers = dict[str, str] | dict[bytes, bytes]
NOT_ASCII = {b"Authorization": "Bearer schlüssel".encode()}


@pytest.fixture
def keyed_server(pool: ServerPool) -> Iterator[Server]:
    server = pool.get(FLAVOURS["keyed_server"])
    server.headers = bearer(ADMIN)
    yield server
    pool.restore()


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("guess"), bearer(USER), {"Authorization": ADMIN}, NOT_ASCII],
    ids=["no key", "wrong key", "user's key", "no bearer", "no ASCII"],
)
def test_routes_refuse_callers_without_the_admin_key(
    keyed_server: Server, headers: Headers
) -> None:
    before = keyed_server.get("/inflight/status")
    for route in routes(keyed_server, bearer(USER)):
        answer = route.call(keyed_server, {}, headers=headers)
        assert answer["status_code"] == 401, (route, answer)
        assert answer["error"] == "Unauthorized"
    after = keyed_server.get("/inflight/status")
    assert (before["epoch"], before["paused"]) == (after["epoch"], after["paused"])


def test_routes_accept_the_admin_key(keyed_server: Server) -> None:
    for route in routes(keyed_server, bearer(USER)):
        answer = route.call(keyed_server, ["no object"], headers=bearer(ADMIN))
        assert answer["status_code"] == (200 if route.method == "GET" else 400), (route, answer)


@pytest.mark.parametrize(
    "path", ["/server_info", "/get_server_info", "/server_info?config_format=json"]
)
def test_answers_and_logs_show_no_key(keyed_server: Server, path: str) -> None:
    info = keyed_server.get(path, headers=bearer(USER))
    assert info["admin_api_key"] == info["api_key"] == REDACTED
    assert info["internal_states"][0]["admin_api_key"] == REDACTED
    assert f"--admin-api-key {REDACTED}" in info["launch_command"]
    for text in (json.dumps(info), keyed_server.log_text()):
        assert USER not in text
        assert ADMIN not in text

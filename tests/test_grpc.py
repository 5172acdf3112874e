"""SGLang's native gRPC server reaches the same engine, with the same pauses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from harness.server import Server
from tests.support.load import ENDLESS, expect_all_go_on, pause, settle, start_running, status
from tests.support.pool import GRPC_PORT
from tests.support.updates import expect_served

SERVICE = "/sglang.runtime.v1.SglangService/"
# a message with ``true`` in its first field
YES = b"\x08\x01"

Call = Callable[..., bytes]


def field(number: int, text: str) -> bytes:
    """Encode a short text field of a message."""
    return bytes([number << 3 | 2, len(text)]) + text.encode()


@pytest.fixture
def server(normal_loop_server: Server) -> Server:
    return normal_loop_server


@pytest.fixture
def call(server: Server) -> Iterator[Call]:
    with grpc.insecure_channel(f"127.0.0.1:{GRPC_PORT}") as channel:

        def call(method: str, request: bytes = b"") -> bytes:
            answer: bytes = channel.unary_unary(SERVICE + method)(request, timeout=60)
            return answer

        yield call


@pytest.mark.parametrize("mode", ["in_place", "retract", "wait", "abort"])
def test_health_check_passes_while_paused(server: Server, call: Call, mode: str) -> None:
    assert call("HealthCheck") == YES
    pause(server, mode)
    assert server.get("/health_generate")["status_code"] == 200
    assert call("HealthCheck") == YES


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_continue_work_over_grpc(server: Server, call: Call, mode: str) -> None:
    running = start_running(server, 2, tokens=ENDLESS)
    assert mode.encode() in call("PauseGeneration", field(1, mode))
    assert status(server)["mode"] == mode
    settle(server, running)
    call("ContinueGeneration")
    expect_all_go_on(running)


def test_unknown_pause_mode_is_refused(server: Server, call: Call) -> None:
    running = start_running(server, 2, tokens=ENDLESS)
    with pytest.raises(grpc.RpcError, match="moon"):
        call("PauseGeneration", field(1, "moon"))
    assert not status(server)["paused"]
    expect_all_go_on(running)


def test_update_from_disk_goes_live_over_grpc(
    server: Server, call: Call, checkpoints: Path
) -> None:
    assert call("UpdateWeightsFromDisk", field(1, str(checkpoints / "v1"))).startswith(YES)
    expect_served(server, 1)
    refused = call("UpdateWeightsFromDisk", field(1, "/nowhere"))
    assert not refused.startswith(YES)
    assert b"/nowhere" in refused
    expect_served(server, 1)

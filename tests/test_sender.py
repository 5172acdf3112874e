"""A trainer's ``Sender``, against a server with running requests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness import marker
from harness.server import Server
from harness.starting import ROOT, end, start
from sglang_inflight.client import AsyncClient, Client, Sender, Session, buckets, trainer_group
from sglang_inflight.client.buckets import Piece, fill_buckets
from sglang_inflight.client.sender import GROUP_NAME
from sglang_inflight.vocabulary.errors import Conflict, Refused
from tests.support.load import ENDLESS, start_running
from tests.support.updates import (
    drop_session,
    expect_served,
    expect_to_run_on,
    serving,
    staging,
    until_idle,
    until_staging,
)

Named = list[tuple[str, torch.Tensor]]
ToServer = Sender[Session]

# a dozen tensors or more per bucket
BUCKET_BYTES = 64 << 10
# more than the socket buffers hold, so sending needs a receiver
LARGE_BYTES = 64 << 20


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client
    drop_session(server)


@pytest.fixture
def sender(client: Client) -> Iterator[ToServer]:
    with Sender(client, bucket_bytes=BUCKET_BYTES) as sender:
        yield sender


def weights(version: int) -> Named:
    return list(marker.tensors(version).items())


def test_sender_changes_no_token_before_the_version_is_whole(
    server: Server, sender: ToServer
) -> None:
    """Each version is one span of each request."""
    generations = start_running(server, 2, tokens=ENDLESS)

    def watched(version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(version):
            yield name, tensor
            if name == "model.layers.0.mlp.up_proj.weight":
                assert staging(server)[0]["tensors"] > 0
                expect_served(server, version - 1)

    for version in (1, 2):
        for generation in generations:
            generation.wait_for_tokens(generation.count + 3)
        receipt = sender.send(watched(version), weight_version=f"v{version}")
        assert receipt["base_version"] == f"v{version - 1}"
        assert receipt["tensors"] == len(weights(version))
    expect_to_run_on(server, generations, [0, 1, 2])


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each bucket's call as it is sent: "lists" or "digest". Short layouts count."""
    sent: list[str] = []
    send = AsyncClient._send_once

    async def note(client: AsyncClient, method: str, path: str, body: Any) -> Any:
        if path == "/update_weights_from_distributed":
            sent.append("lists" if "names" in body else "digest")
        return await send(client, method, path, body)

    monkeypatch.setattr(AsyncClient, "_send_once", note)
    monkeypatch.setattr(buckets, "FEWEST_KEPT", 1)
    return sent


def test_layouts_are_sent_once(server: Server, sender: ToServer, sent: list[str]) -> None:
    for version in (1, 2, 3):
        sender.send(weights(version), weight_version=f"v{version}")
        expect_served(server, version)
    count = len(sent) // 3
    assert sent == ["lists"] * count + ["digest"] * 2 * count


def test_layout_unknown_to_the_server_is_sent_while_its_broadcast_waits(
    server: Server, client: Client, sent: list[str]
) -> None:
    """The client takes the server for the one before a restart. The group stays as it is."""
    # no other test sends them in this order: only buckets of one tensor may be known
    pieces = (Piece.whole(name, tensor) for name, tensor in reversed(weights(1)))
    layouts = [bucket.layout_digest for bucket in fill_buckets(pieces, BUCKET_BYTES, "cpu")]
    client.client._layouts._sent |= dict.fromkeys(filter(None, layouts))
    with Sender(client, bucket_bytes=BUCKET_BYTES) as sender:
        group = sender._group
        for version in (1, 2):
            sender.send(reversed(weights(version)), weight_version=f"v{version}")
            expect_served(server, version)
        assert sender._group is group
    assert sent.count("digest") == 2 * len(layouts)
    assert 0 < sent.count("lists") <= len(layouts)
    assert "lists" not in sent[-len(layouts) :]


def test_wrong_shape_is_named_and_the_next_version_goes_live(
    server: Server, sender: ToServer
) -> None:
    generations = start_running(server, 2, tokens=ENDLESS)
    before = serving(server)
    wrong = [
        (name, tensor[:-1] if name == "model.layers.0.mlp.up_proj.weight" else tensor)
        for name, tensor in weights(1)
    ]
    with pytest.raises(Refused, match=r"layers\.0\.mlp"):
        sender.send(wrong, weight_version="wrong")
    assert serving(server) == before
    assert staging(server)[0]["state"] == "empty"
    sender.send(weights(1), weight_version="v1")
    expect_to_run_on(server, generations, [0, 1])


def test_broadcast_of_fewer_bytes_than_described_is_refused(
    server: Server, sender: ToServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo takes what comes for the whole, and leaves the rest of the buffer as it was."""
    broadcast = trainer_group.TrainerGroup.broadcast

    def broadcast_half(group: Any, flat: torch.Tensor) -> Any:
        return broadcast(group, flat[: len(flat) // 2].clone())

    with monkeypatch.context() as patch:
        patch.setattr(trainer_group.TrainerGroup, "broadcast", broadcast_half)
        with pytest.raises(Refused, match="fewer bytes than its call describes"):
            sender.send(weights(1))
    expect_served(server, 0)
    sender.send(weights(1))
    expect_served(server, 1)


def test_missing_tensor_is_named(server: Server, sender: ToServer) -> None:
    sender.send(weights(0), weight_version="v0")
    before = serving(server)
    with pytest.raises(Refused, match=r"model\.norm"):
        sender.send([pair for pair in weights(1) if pair[0] != "model.norm.weight"])
    assert serving(server) == before
    head = [pair for pair in weights(1) if pair[0] == "lm_head.weight"]
    sender.send(head, weight_version="v1", partial=True)
    expect_served(server, 1)


def test_failing_trainer_drops_the_session_and_keeps_the_group(
    server: Server, sender: ToServer
) -> None:
    before = serving(server)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(1)[:12]
        raise ZeroDivisionError

    group = sender._group
    with pytest.raises(ZeroDivisionError):
        sender.send(failing())
    assert serving(server) == before
    assert staging(server)[0]["state"] == "empty"
    sender.send(weights(1), weight_version="v1")
    assert sender._group is group
    expect_served(server, 1)


def test_value_without_a_tensor_is_refused(server: Server, sender: ToServer) -> None:
    with pytest.raises(TypeError, match="'b' is a list"):
        sender.send([("a", torch.ones(1)), ("b", [1.0])])  # type: ignore[list-item]
    assert staging(server)[0]["state"] == "empty"


def test_replaced_session_leaves_no_broadcast_behind(server: Server, sender: ToServer) -> None:
    """The call is refused during the broadcast, so no rank will receive it."""

    def replaced() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(1)[:12]
        server.post("/begin_weight_update", {"non_blocking": True, "on_busy": "replace"})
        yield "large", torch.zeros(LARGE_BYTES, dtype=torch.uint8)

    with pytest.raises(Conflict, match="is not open"):
        sender.send(replaced())
    assert not trainer_group._stuck, "a broadcast is left, and the end of the process waits for it"
    drop_session(server)
    sender.send(weights(1), weight_version="v1")
    expect_served(server, 1)


def test_second_sender_of_the_same_name_is_refused(
    server: Server, client: Client, sender: ToServer
) -> None:
    """The first sender goes on."""
    with Client(server.url) as other, pytest.raises(Refused, match="is taken"):
        Sender(other).join()
    # the refused sender never joined, so leaving changes nothing
    sender.send(weights(1), weight_version="v1")
    expect_served(server, 1)


def test_killed_sender_loses_its_session_and_its_group(server: Server, client: Client) -> None:
    """The session ends with its lease, and the next sender replaces the group."""
    generations = start_running(server, 2, tokens=ENDLESS)
    before = serving(server)
    command = ["-m", "tests.support.halting_sender", server.url]
    with open(os.devnull, "wb") as nothing:
        process = start(command, output=nothing, cwd=ROOT)
    try:
        until_staging(server, tensors=12)
    finally:
        end(process)
    until_idle(server)
    assert serving(server) == before
    # whether the group is in step depends on the moment of the kill
    assert list(staging(server)[0]["groups"]) == [GROUP_NAME]
    with Sender(client) as sender:
        sender.send(weights(1), weight_version="v1")
    expect_to_run_on(server, generations, [0, 1])

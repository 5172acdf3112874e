"""A trainer's ``Sender``, against a server whose requests run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from harness import marker
from harness.server import Server
from harness.starting import ROOT, end, start
from sglang_inflight.client import Client, Sender, Session, trainer_group
from sglang_inflight.client.sender import GROUP_NAME
from sglang_inflight.errors import Conflict, Refused
from tests.support.load import ENDLESS, start_running
from tests.support.updates import (
    drop_session,
    expect_to_run_on,
    says,
    serving,
    staging,
    until_idle,
    until_staging,
)

Named = list[tuple[str, torch.Tensor]]
ToServer = Sender[Session]

# a dozen tensors and more
BUCKET_BYTES = 64 << 10
# more than the buffers between two processes hold: it is sent only if it is received
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


def test_versions_go_live_whole(server: Server, sender: ToServer) -> None:
    """Half of a version changes no token, and each is a span of every request."""
    generations = start_running(server, 2, tokens=ENDLESS)

    def watched(version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(version):
            yield name, tensor
            if name == "model.layers.1.mlp.up_proj.weight":
                assert staging(server)[0]["tensors"] > 0
                says(server, version - 1)

    for version in (1, 2):
        for generation in generations:
            generation.wait_for_tokens(generation.count + 3)
        receipt = sender.send(watched(version), weight_version=f"v{version}")
        assert receipt["base_version"] == f"v{version - 1}"
        assert receipt["tensors"] == len(weights(version))
    expect_to_run_on(server, generations, [0, 1, 2])


def test_a_wrong_shape_in_the_middle(server: Server, sender: ToServer) -> None:
    """It is named, nothing has changed, and the next version is sent as if nothing had been."""
    generations = start_running(server, 2, tokens=ENDLESS)
    before = serving(server)
    wrong = [
        (name, tensor[:-1] if name == "model.layers.1.mlp.up_proj.weight" else tensor)
        for name, tensor in weights(1)
    ]
    with pytest.raises(Refused, match=r"layers\.1\.mlp"):
        sender.send(wrong, weight_version="wrong")
    assert serving(server) == before
    assert staging(server)[0]["state"] == "empty"
    sender.send(weights(1), weight_version="v1")
    expect_to_run_on(server, generations, [0, 1])


def test_a_tensor_that_is_missing(server: Server, sender: ToServer) -> None:
    sender.send(weights(0), weight_version="v0")
    before = serving(server)
    with pytest.raises(Refused, match=r"model\.norm"):
        sender.send([pair for pair in weights(1) if pair[0] != "model.norm.weight"])
    assert serving(server) == before
    head = [pair for pair in weights(1) if pair[0] == "lm_head.weight"]
    sender.send(head, weight_version="v1", partial=True)
    says(server, 1)


def test_a_trainer_that_fails(server: Server, sender: ToServer) -> None:
    """Between two buckets: the session is dropped, and the group is what it was."""
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
    says(server, 1)


def test_what_is_no_whole_tensor(server: Server, sender: ToServer) -> None:
    with pytest.raises(TypeError, match="'b' is a list"):
        sender.send([("a", torch.ones(1)), ("b", [1.0])])  # type: ignore[list-item]
    assert staging(server)[0]["state"] == "empty"


def test_a_session_that_is_replaced(server: Server, sender: ToServer) -> None:
    """The bucket's call is refused while it is broadcast, and nobody will receive it."""

    def replaced() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(1)[:12]
        server.post("/begin_weight_update", {"non_blocking": True, "on_busy": "replace"})
        yield "large", torch.zeros(LARGE_BYTES, dtype=torch.uint8)

    with pytest.raises(Conflict, match="is not open"):
        sender.send(replaced())
    assert not trainer_group._stuck, "a broadcast is left, and the end of the process waits for it"
    drop_session(server)
    sender.send(weights(1), weight_version="v1")
    says(server, 1)


def test_a_name_that_is_taken(server: Server, client: Client, sender: ToServer) -> None:
    """By a trainer that is there: the second one hears it at once, and the first goes on."""
    with Client(server.url) as other, pytest.raises(Refused, match="is taken"):
        Sender(other).join()
    # what the second left was never joined
    sender.send(weights(1), weight_version="v1")
    says(server, 1)


def test_a_sender_that_is_killed_between_two_pieces(server: Server, client: Client) -> None:
    """Its session ends with the lease, and its group gives way."""
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
    # in step or not: that depends on the moment
    assert list(staging(server)[0]["groups"]) == [GROUP_NAME]
    with Sender(client) as sender:
        sender.send(weights(1), weight_version="v1")
    expect_to_run_on(server, generations, [0, 1])

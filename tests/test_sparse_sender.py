"""A ``Sender`` of changes sends them where their base is served, and whole versions elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from harness import marker
from harness.server import Server, serve
from sglang_inflight.client import Client, Receipt, Sender, Session
from sglang_inflight.client.trainer_group import TrainerGroup
from sglang_inflight.vocabulary.errors import Refused
from tests.support.load import (
    ENDLESS,
    expect_all_go_on,
    more_tokens,
    start_running,
    status,
    versions_of,
)
from tests.support.updates import (
    LIVE,
    Weights,
    drop_session,
    expect_served,
    serving,
    succeed,
    tensor_body,
)

pytest_plugins = ["tests.support.fixtures"]

ToServer = Sender[Session]

# a dozen tensors or more per bucket
BUCKET_BYTES = 64 << 10
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
TENSORS = len(marker.tensors(0))
# between two versions a row of the head becomes zero, and another one becomes one
CHANGED = 2 * marker.HIDDEN
# an index of four bytes, and a value of two
CHANGES_BYTES = 6 * CHANGED


@pytest.fixture
def served(any_server: Server) -> Iterator[Server]:
    yield any_server
    drop_session(any_server)


@pytest.fixture
def sender(served: Server) -> Iterator[ToServer]:
    with Client(served.url) as client, sending_to(client) as sender:
        yield sender


@pytest.fixture
def broadcasts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the bytes of each broadcast."""
    sent: list[int] = []
    broadcast = TrainerGroup.broadcast

    def count(group: TrainerGroup, tensor: torch.Tensor) -> Callable[[], bool]:
        sent.append(tensor.nbytes)
        return broadcast(group, tensor)

    monkeypatch.setattr(TrainerGroup, "broadcast", count)
    return sent


def sending_to(client: Client) -> ToServer:
    return Sender(client, bucket_bytes=BUCKET_BYTES, sparse=True)


def send(sender: ToServer, weights: Weights, version: int, *, partial: bool = False) -> Receipt:
    sent = sender.send(weights.items(), weight_version=f"v{version}", partial=partial)
    assert sent.receipt is not None
    return sent.receipt


def send_whole(sender: ToServer, version: int) -> Receipt:
    receipt = send(sender, marker.tensors(version), version)
    assert receipt.tensors == TENSORS
    return receipt


def send_changes(sender: ToServer, version: int) -> Receipt:
    """Send a version, and check that nothing but the changes of its head was sent."""
    receipt = send(sender, marker.tensors(version), version)
    assert receipt.tensors == 1
    return receipt


def expect_digest_of(server: Server, weights: Weights) -> None:
    """Check that a load of all ``weights`` ends with the digest served now."""
    before = [rank["digest"] for rank in status(server)["ranks"]]
    body = tensor_body(weights, ranks=len(before), **LIVE, partial=False)
    assert [
        rank["digest"]
        for rank in succeed(server.post("/update_weights_from_tensor", body))["ranks"]
    ] == before


def test_changes_reach_running_requests_exactly(
    served: Server, sender: ToServer, broadcasts: list[int]
) -> None:
    generations = start_running(served, 3, tokens=ENDLESS)
    send_whole(sender, 1)
    more_tokens(generations)
    broadcasts.clear()
    for version in 2, 3, 4:
        receipt = send_changes(sender, version)
        assert receipt.base_version == f"v{version - 1}"
        assert receipt.staged_as is not None
        if receipt.staged_as.form == "changes":
            elements = sum(tensor.numel() for tensor in marker.tensors(0).values())
            assert receipt.staged_as.changed_elements == CHANGED
            fraction = CHANGED / elements
            assert receipt.staged_as.changed_fraction == pytest.approx(fraction, rel=0.2)
        more_tokens(generations)
    assert broadcasts == [CHANGES_BYTES] * 3
    for output in expect_all_go_on(generations):
        assert versions_of(output) == ["v0", "v1", "v2", "v3", "v4"]
    expect_served(served, 4)
    expect_digest_of(served, marker.tensors(4))


def test_whole_and_sparse_tensors_go_live_together(served: Server, sender: ToServer) -> None:
    """A small change goes sparse, a large one whole; the sign of a zero is a change."""
    send_whole(sender, 1)
    weights = marker.tensors(2)
    weights[NORM] = weights[NORM] * 1.5
    halves = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    for at, name in enumerate(halves, 1):
        weights[name].view(-1)[at::7] += 0.5
    weights["model.layers.0.mlp.down_proj.weight"].view(-1)[5] = -0.0
    receipt = send(sender, weights, 2)
    assert receipt.tensors == 5
    expect_served(served, 2)
    expect_digest_of(served, weights)


def test_unchanged_version_is_committed(served: Server, sender: ToServer) -> None:
    send_whole(sender, 1)
    epoch = serving(served)[0][3]
    receipt = send(sender, marker.tensors(1), 2)
    assert (receipt.weight_version, receipt.epoch, receipt.tensors) == ("v2", epoch + 1, 0)
    expect_digest_of(served, marker.tensors(1))


def test_update_behind_the_senders_back_is_replaced_by_a_whole_version(
    served: Server, sender: ToServer
) -> None:
    """The other trainer's version has the same name, and its weights decide."""
    send_whole(sender, 1)
    send_changes(sender, 2)
    other = marker.tensors(5)
    other[NORM] = other[NORM] * 1.5
    body = tensor_body(other, **LIVE, weight_version="v2")
    succeed(served.post("/update_weights_from_tensor", body))
    send_whole(sender, 3)
    send_changes(sender, 4)
    expect_digest_of(served, marker.tensors(4))


def test_rollback_is_followed_by_a_whole_version(served: Server, sender: ToServer) -> None:
    send_whole(sender, 1)
    send_changes(sender, 2)
    succeed(served.post("/inflight/rollback", {}))
    send_whole(sender, 3)
    send_changes(sender, 4)
    expect_digest_of(served, marker.tensors(4))


def test_renamed_version_is_still_a_base(served: Server, sender: ToServer) -> None:
    send_whole(sender, 1)
    succeed(served.post("/update_weight_version", {"new_version": "renamed"}))
    assert send_changes(sender, 2).base_version == "renamed"


def test_refused_version_is_followed_by_a_whole_one(served: Server, sender: ToServer) -> None:
    send_whole(sender, 1)
    before = serving(served)
    for wrong in (torch.ones(7), torch.full((marker.HIDDEN,), torch.nan)):
        with pytest.raises(Refused, match=r"model\.norm"):
            send(sender, marker.tensors(2) | {NORM: wrong.bfloat16()}, 2)
        assert serving(served) == before
    send_whole(sender, 3)
    send_changes(sender, 4)
    expect_digest_of(served, marker.tensors(4))


def test_failing_trainer_sends_a_whole_version_next(served: Server, sender: ToServer) -> None:
    """Its failed version is not sent again, because its other tensors are lost."""
    send_whole(sender, 1)
    before = serving(served)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(marker.tensors(2).items())[-1:]
        raise Refused("the trainer's own error")

    with pytest.raises(Refused, match="own error"):
        sender.send(failing(), partial=True)
    assert serving(served) == before
    send_whole(sender, 3)
    send_changes(sender, 4)
    expect_digest_of(served, marker.tensors(4))


def test_missing_tensor_is_named_and_a_part_changes(
    served: Server, sender: ToServer, broadcasts: list[int]
) -> None:
    send_whole(sender, 1)
    before = serving(served)
    heads = [{HEAD: marker.tensors(version)[HEAD]} for version in range(5)]
    with pytest.raises(Refused, match=r"embed_tokens"):
        send(sender, heads[2], 2)
    assert serving(served) == before
    broadcasts.clear()
    for version in 3, 4:
        send(sender, heads[version], version, partial=True)
        expect_served(served, version)
    # after a refusal nothing is known of the server, so the first part goes whole
    assert broadcasts == [heads[3][HEAD].nbytes, CHANGES_BYTES]
    send_whole(sender, 5)


def test_changes_reach_each_rank_of_two(tp2_server: Server) -> None:
    with Client(tp2_server.url) as client, sending_to(client) as sender:
        send_whole(sender, 1)
        for version in 2, 3:
            assert len(send_changes(sender, version).ranks) == 2
    expect_digest_of(tp2_server, marker.tensors(3))


def test_server_without_its_checkpoint_gets_whole_versions(
    checkpoints: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The shapes of sparse tensors are the checkpoint's. The version that tried is served, too."""
    model = marker.build(tmp_path / "model", 0)
    with serve(model, "--weight-version", "v0", log=tmp_path / "log") as server:
        (model / "model.safetensors").unlink()
        with Client(server.url) as client, sending_to(client) as sender:
            for version in 1, 2, 3:
                send_whole(sender, version)
                expect_served(server, version)
    assert caplog.text.count("changes were refused") == 1

"""A transfer that changed a bit is refused, by the digests that its sender has computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import marker
from harness.server import Server
from sglang_inflight.client import (
    Client,
    Fleet,
    FleetRefused,
    Receipt,
    Sender,
    Session,
    digest_of_all,
    digests,
)
from sglang_inflight.client.trainer_group import TrainerGroup
from sglang_inflight.vocabulary.errors import Altered
from tests.support.load import ENDLESS, pause, resume, start_running, status
from tests.support.memory_release import release, resume_memory
from tests.support.pool import CUSTOM_LOADER
from tests.support.sparse import SPARSE_SOURCES, SparseSender, changes_between
from tests.support.updates import (
    LIVE,
    SOURCES,
    V1,
    Weights,
    drop_session,
    expect_served,
    expect_to_run_on,
    message_of,
    refuse,
    serving,
    staging,
    succeed,
    tensor_body,
)
from tests.support.updates import Sender as AnySource

pytest_plugins = ["tests.support.fixtures"]

DISK, TENSOR = "/update_weights_from_disk", "/update_weights_from_tensor"
BEGIN, SEAL, END = "/begin_weight_update", "/seal_weight_update", "/end_weight_update"
NORM, HEAD = "model.norm.weight", "lm_head.weight"
# the digest of no tensor
OTHER = "0123456789abcdef"


def flipped(tensor: torch.Tensor, bit: int = 0) -> torch.Tensor:
    """Return ``tensor`` with another ``bit`` in its first byte."""
    altered = tensor.clone()
    altered.view(-1).view(torch.uint8)[0] ^= 1 << bit
    return altered


def altered(version: int, name: str = NORM) -> Weights:
    weights = marker.tensors(version)
    return weights | {name: flipped(weights[name])}


def digest_of(weights: Weights) -> str:
    return digest_of_all(digests(weights).values())


def received(receipt: Any) -> list[str | None]:
    return [rank["received_digest"] for rank in receipt["ranks"]]


@pytest.mark.parametrize("source", SOURCES)
def test_other_tensor_than_expected_is_refused_by_name(
    any_server: Server, sender: AnySource, source: str
) -> None:
    running = start_running(any_server, 1, tokens=ENDLESS)
    before = serving(any_server)
    wrong = {**V1, "expected_digests": digests(altered(1))}
    said = refuse(sender.send(any_server, source, 1, **wrong), repr(NORM), "another digest")
    assert (said["error"]["type"], HEAD in message_of(said)) == ("Altered", False)
    assert serving(any_server) == before

    right = {**V1, "expected_digests": digests(marker.tensors(1))}
    receipt = succeed(sender.send(any_server, source, 1, **right))
    assert received(receipt) == [digest_of(marker.tensors(1))]
    expect_to_run_on(any_server, running, [0, 1])


@pytest.mark.parametrize("source", ["disk_shards", "tensor_bucket", "distributed"])
def test_other_whole_than_expected_is_refused(
    server: Server, sender: AnySource, source: str
) -> None:
    before = serving(server)
    wrong = digest_of(altered(1))
    refuse(sender.send(server, source, 1, **V1, expected_digest=wrong), wrong, "another one")
    assert serving(server) == before
    right = digest_of(marker.tensors(1))
    receipt = succeed(sender.send(server, source, 1, **V1, expected_digest=right))
    assert received(receipt) == [right]
    expect_served(server, 1)


def test_tensors_without_digest_and_digests_without_tensor_are_named(server: Server) -> None:
    before = serving(server)
    body = {**V1, **tensor_body(marker.tensors(1))}
    expected = digests(marker.tensors(1))
    expected["model.extra.weight"] = expected.pop(HEAD)
    said = refuse(server.post(TENSOR, {**body, "expected_digests": expected}))
    assert f"{HEAD!r} came without an expected digest" in message_of(said)
    assert "'model.extra.weight' did not come" in message_of(said)
    refuse(server.post(TENSOR, {**body, "expected_digests": {}}), "more came without")
    for wrong in "zz", OTHER.upper(), OTHER[1:]:
        refuse(server.post(TENSOR, {**body, "expected_digests": {HEAD: wrong}}), "expected_digests")
        refuse(server.post(TENSOR, {**body, "expected_digest": wrong}), "expected_digest")
    assert serving(server) == before


def test_altered_value_is_named_before_what_it_leads_to(server: Server) -> None:
    """A flipped bit may make a value that the server refuses for another reason."""
    weights = marker.tensors(1)
    expected = digests(weights)
    weights[NORM][0] = torch.inf
    said = server.post(TENSOR, {**V1, **tensor_body(weights), "expected_digests": expected})
    refuse(said, repr(NORM), "another digest", "NaN or infinity")
    assert said["error"]["type"] == "Altered"


def test_receipt_says_the_received_digest_only_if_asked(server: Server) -> None:
    body = {**V1, **tensor_body(marker.tensors(1))}
    assert received(succeed(server.post(TENSOR, body))) == [None]
    asked = succeed(server.post(TENSOR, {**body, "received_digest": True}))
    assert received(asked) == [digest_of(marker.tensors(1))]
    assert received(succeed(server.post("/inflight/rollback", {}))) == [None]


@pytest.mark.parametrize("source", SPARSE_SOURCES)
def test_altered_change_is_refused_by_name(
    any_server: Server, sparse_sender: SparseSender, source: str
) -> None:
    before = serving(any_server)
    changed = changes_between(0, 1)
    values = f"{HEAD}.values"
    wrong = digests(changed | {values: flipped(changed[values])})
    fields = {**V1, "base_version": "v0"}
    sent = sparse_sender.send(any_server, source, changed, **fields, expected_digests=wrong)
    refuse(sent, repr(values), "another digest")
    assert serving(any_server) == before
    right = digests(changed)
    sent = sparse_sender.send(any_server, source, changed, **fields, expected_digests=right)
    assert received(succeed(sent)) == [digest_of(changed)]
    expect_served(any_server, 1)


def test_digests_of_parameters_and_of_a_custom_loader_are_compared(
    normal_loop_server: Server,
) -> None:
    server = normal_loop_server
    body = {**V1, **tensor_body(marker.tensors(1)), "load_format": CUSTOM_LOADER}
    direct = {"lm_head.weight": marker.tensors(2)[HEAD]}
    copied = {**LIVE, **tensor_body(direct), "load_format": "direct", "weight_version": "v2"}
    for sent, weights in (body, marker.tensors(1)), (copied, direct):
        before = serving(server)
        wrong = digests(weights | {HEAD: flipped(weights[HEAD])})
        refuse(server.post(TENSOR, {**sent, "expected_digests": wrong}), repr(HEAD))
        assert serving(server) == before
        right = {**sent, "expected_digests": digests(weights)}
        assert received(succeed(server.post(TENSOR, right))) == [digest_of(weights)]
    expect_served(server, 2)


# ---- sessions ---------------------------------------------------------------------------


def halves(weights: Weights) -> list[Weights]:
    names = [*weights]
    return [{name: weights[name] for name in part} for part in (names[:9], names[9:])]


def begin(server: Server, **fields: Any) -> dict[str, str]:
    begun = succeed(server.post(BEGIN, {"non_blocking": True, **fields}))
    return {"session_id": begun["session_id"]}


def send_halves(server: Server, session: dict[str, str], weights: Weights) -> None:
    for half in halves(weights):
        succeed(server.post(TENSOR, {**tensor_body(half), **session}))


@pytest.mark.parametrize("refuses", [SEAL, END])
def test_altered_session_is_refused_as_a_whole(any_server: Server, refuses: str) -> None:
    server = any_server
    before = serving(server)
    right = {"expected_digest": digest_of(marker.tensors(1))}
    session = begin(server, received_digest=True)
    send_halves(server, session, altered(1))
    refuse(server.post(refuses, {**session, **right}), right["expected_digest"], "the session")
    assert serving(server) == before
    assert staging(server)[0]["state"] == "empty"

    session = begin(server, received_digest=True)
    send_halves(server, session, marker.tensors(1))
    if refuses == SEAL:
        succeed(server.post(SEAL, {**session, **right}))
    receipt = succeed(server.post(END, {**session, **right, "non_blocking": True}))
    assert received(receipt) == [right["expected_digest"]]
    expect_served(server, 1)


def test_end_of_a_sealed_session_compares_its_digest(server: Server) -> None:
    """A client may seal first, and say the digest only at the end."""
    before = serving(server)
    session = begin(server, received_digest=True)
    send_halves(server, session, altered(1))
    succeed(server.post(SEAL, session))
    right = {**session, "expected_digest": digest_of(marker.tensors(1)), "non_blocking": True}
    refuse(server.post(END, right), "the session")
    assert serving(server) == before


def test_altered_piece_drops_its_session(server: Server) -> None:
    before = serving(server)
    first, second = halves(marker.tensors(1))
    session = begin(server)
    piece = {**tensor_body(first), **session, "expected_digests": digests(first)}
    succeed(server.post(TENSOR, piece))
    name = next(iter(second))
    wrong = digests(second) | {name: OTHER}
    piece = {**tensor_body(second), **session, "expected_digests": wrong}
    refuse(server.post(TENSOR, piece), repr(name))
    refuse(server.post(END, session), "another digest", status_code=409)
    assert serving(server) == before


def test_digest_of_a_session_with_an_undigested_piece_is_refused(server: Server) -> None:
    """It could not be compared with all that came."""
    before = serving(server)
    first, second = halves(marker.tensors(1))
    session = begin(server)
    succeed(server.post(TENSOR, {**tensor_body(first), **session, "received_digest": True}))
    succeed(server.post(TENSOR, {**tensor_body(second), **session}))
    whole = {**session, "expected_digest": digest_of(marker.tensors(1))}
    refuse(server.post(END, whole), "received_digest=true")
    assert serving(server) == before

    session = begin(server)
    for half in first, second:
        piece = {**tensor_body(half), **session, "expected_digest": digest_of(half)}
        succeed(server.post(TENSOR, piece))
    receipt = succeed(server.post(END, {**whole, **session, "non_blocking": True}))
    assert received(receipt) == [digest_of(marker.tensors(1))]


# ---- several ranks, and weights written in place ----------------------------------------


def test_tensor_altered_on_one_rank_changes_no_rank(tp2_server: Server) -> None:
    server = tp2_server
    before = serving(server)
    right, wrong = (tensor_body(w) for w in (marker.tensors(1), altered(1)))
    payloads = [body["serialized_named_tensors"][0] for body in (right, wrong)]
    body = {**V1, "serialized_named_tensors": payloads}
    expected = {"expected_digests": digests(marker.tensors(1))}
    said = message_of(refuse(server.post(TENSOR, {**body, **expected}), repr(NORM)))
    assert ("tp1" in said, "tp0" in said) == (True, False)
    whole = {"expected_digest": digest_of(marker.tensors(1))}
    said = message_of(refuse(server.post(TENSOR, {**body, **whole}), digest_of(altered(1))))
    assert ("tp1" in said, "tp0" in said) == (True, False)
    session = begin(server, received_digest=True)
    succeed(server.post(TENSOR, {**body, **session, "weight_version": None}))
    said = message_of(refuse(server.post(END, {**session, **whole}), digest_of(altered(1))))
    assert ("tp1" in said, "tp0" in said) == (True, False)
    assert serving(server) == before

    body = {**V1, **tensor_body(marker.tensors(1), ranks=2)}
    receipt = succeed(server.post(TENSOR, {**body, **expected, **whole}))
    assert received(receipt) == [whole["expected_digest"]] * 2
    expect_served(server, 1)


def test_digests_of_weights_written_in_place_are_refused_before_the_first(
    off_server: Server, sender: AnySource
) -> None:
    server = off_server
    (running,) = start_running(server, 1, tokens=ENDLESS)
    before = serving(server)
    asks: list[dict[str, Any]] = [
        {"expected_digests": digests(marker.tensors(1))},
        {"expected_digest": digest_of(marker.tensors(1))},
        {"received_digest": True},
    ]
    for asked in asks:
        for source in "disk", "tensor":
            refuse(sender.send(server, source, 1, **V1, **asked), "written in place")
    refuse(server.post(BEGIN, {"received_digest": True}), "written in place")
    succeed(server.post(BEGIN, {}))
    refuse(server.post(TENSOR, {**tensor_body(marker.tensors(1)), **asks[0]}), "written in place")
    drop_session(server)
    assert serving(server) == before
    assert staging(server)[0]["dirty"] is None
    succeed(sender.send(server, "tensor", 1, **V1))
    expect_to_run_on(server, [running], [0, 1])


def test_altered_tensors_do_not_fill_released_weights(
    workers_server: Server, sender: AnySource
) -> None:
    server = workers_server
    pause_id = pause(server, "retract")["pause_id"]
    release(server, "weights", keep_weights="discard")
    assert resume_memory(server, "weights")["hollow"] is not None
    fields = {**V1, "partial": False}
    refuse(
        sender.send(server, "tensor", 1, **fields, expected_digests=digests(altered(1))), repr(NORM)
    )
    assert status(server)["memory"]["hollow"] is not None
    right = digests(marker.tensors(1))
    succeed(sender.send(server, "tensor", 1, **fields, expected_digests=right))
    resume(server, pause_id=pause_id)
    expect_served(server, 1)


# ---- our client -------------------------------------------------------------------------


@pytest.fixture
def client(any_server: Server) -> Iterator[Client]:
    with Client(any_server.url) as client:
        yield client
    drop_session(any_server)


@pytest.fixture
def flips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of bytes, counted from the first broadcast on, to flip a bit of on the way."""
    places: list[int] = []
    broadcast = TrainerGroup.broadcast
    sent = 0

    def alter(group: TrainerGroup, tensor: torch.Tensor) -> Callable[[], bool]:
        nonlocal sent
        here = tensor.clone()
        for place in places:
            if sent <= place < sent + here.nbytes:
                here.view(-1).view(torch.uint8)[place - sent] ^= 1
        sent += here.nbytes
        return broadcast(group, here)

    monkeypatch.setattr(TrainerGroup, "broadcast", alter)
    return places


@pytest.mark.parametrize("sparse", [False, True], ids=["whole", "sparse"])
def test_sender_refuses_a_bit_flipped_by_the_network(
    any_server: Server, client: Client, flips: list[int], sparse: bool
) -> None:
    server = any_server
    running = start_running(server, 1, tokens=ENDLESS)
    with Sender(client, bucket_bytes=64 << 10, sparse=sparse, check=True) as sender:

        def send(version: int) -> Receipt:
            sent = sender.send(marker.tensors(version).items(), weight_version=f"v{version}")
            assert isinstance(sent, Session)
            assert sent.receipt is not None
            return sent.receipt

        flips.append(100)
        before = serving(server)
        with pytest.raises(Altered, match="came with another digest"):
            send(1)
        assert serving(server) == before
        flips.clear()
        assert received(send(1)) == [digest_of(marker.tensors(1))]
        receipt = send(2)
        whole = digest_of(changes_between(1, 2) if sparse else marker.tensors(2))
        assert received(receipt) == [whole]
    expect_to_run_on(server, running, [0, 1, 2])


def test_sender_without_check_sends_no_digests(
    any_server: Server, client: Client, flips: list[int]
) -> None:
    """It shows that a bit flipped by ``flips`` reaches the weights."""
    flips.append(100)
    with Sender(client, bucket_bytes=64 << 10) as sender:
        sent = sender.send(marker.tensors(1).items(), weight_version="v1")
    assert received(sent.receipt) == [None]
    body = {**tensor_body(marker.tensors(1)), **LIVE, "partial": False}
    assert sent.receipt is not None
    assert (
        succeed(any_server.post(TENSOR, body))["ranks"][0]["digest"] != sent.receipt.ranks[0].digest
    )


def test_session_of_a_client_compares_its_digest(any_server: Server, client: Client) -> None:
    before = serving(any_server)
    whole = digest_of(marker.tensors(1))

    def send(weights: Weights) -> Receipt | None:
        with client.session(weight_version="v1", expected_digest=whole) as session:
            for half in halves(weights):
                client.update("tensor", **tensor_body(half))
        return session.receipt

    with pytest.raises(Altered, match=whole):
        send(altered(1))
    assert serving(any_server) == before
    assert received(send(marker.tensors(1))) == [whole]


def test_fleet_commits_nowhere_what_was_altered(server: Server, checkpoints: Path) -> None:
    before = serving(server)
    whole = digest_of(marker.tensors(1))
    with Fleet([server.url]) as fleet:
        with (
            pytest.raises(FleetRefused) as refused,
            fleet.session(weight_version="v1", expected_digest=whole),
        ):
            fleet.update("tensor", **tensor_body(altered(1)))
        (failure,) = refused.value.report.failures.values()
        assert isinstance(failure, Altered)
        assert refused.value.report.phase == "seal"
        assert serving(server) == before
        path = str(checkpoints / "v1")
        report = fleet.update_from_disk(path, weight_version="v1", expected_digest=whole)
        assert [received(receipt) for receipt in report.answers.values()] == [[whole]]
    expect_served(server, 1)

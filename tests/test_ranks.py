"""Two ranks, of one replica or of two: both commit an update, or neither does."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import psutil
import pytest

from harness import marker
from harness.server import Server
from sglang_inflight.client import layout_digest
from sglang_inflight.client.buckets import Piece, fill_buckets
from tests.support.faults import Faults, Kind, Phase
from tests.support.idle import expect_nothing_spins
from tests.support.load import (
    ENDLESS,
    Generation,
    expect_spans,
    pause,
    resume,
    settle,
    start_running,
    status,
    until,
)
from tests.support.sparse import SPARSE_SOURCES, SparseSender, changes_between
from tests.support.updates import (
    V1,
    Call,
    Sender,
    expect_served,
    expect_to_run_on,
    refuse,
    serving,
    succeed,
    tensor_body,
    until_idle,
    until_staging,
)

pytest_plugins = ["tests.support.fixtures"]

RANKS = 2
STREAMS = 4
# timeout of an update meant to fail, longer than the other rank takes on a busy machine
SHORT_S = 4.0
NAMES = {
    "tp2_server": ["rank dp0 pp0 tp0", "rank dp0 pp0 tp1"],
    "dp2_server": ["rank dp0 pp0 tp0", "rank dp1 pp0 tp0"],
}


@pytest.fixture(params=NAMES)
def flavour(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def server(flavour: str, request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(flavour)
    return server


@pytest.fixture
def streams(server: Server) -> list[Generation]:
    """Requests on every replica; the check makes sure of that."""
    streams = start_running(server, STREAMS, tokens=ENDLESS)
    ranks = status(server)["ranks"]
    assert all(rank["running"] for rank in ranks), ranks
    return streams


def names_of(answer: dict[str, Any], flavour: str) -> list[str]:
    names = [f"rank dp{r['dp_rank']} pp{r['pp_rank']} tp{r['tp_rank']}" for r in answer["ranks"]]
    assert names == NAMES[flavour]
    return names


def expect_every_rank_serves(server: Server, version: int) -> None:
    """Check that each rank serves the version. Ranks of one replica differ in their digests."""
    assert [served[2] for served in serving(server)] == [f"v{version}"] * RANKS


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_pause_is_acknowledged_by_every_rank(
    server: Server, flavour: str, streams: list[Generation], mode: str
) -> None:
    answer = pause(server, mode)
    names_of(answer, flavour)
    settle(server, streams)
    assert all(rank["state"] == "frozen" for rank in status(server)["ranks"])
    # ranks of one replica hold the same requests; each replica has its own
    replicas = 1 if flavour == "tp2_server" else 2
    counted = {"in_place": "running", "retract": "retracted", "abort": "aborted"}[mode]
    assert sum(rank[counted] for rank in answer["ranks"]) == STREAMS * RANKS // replicas
    resume(server)
    assert all(rank["state"] == "running" for rank in status(server)["ranks"])
    if mode == "abort":
        for generation in streams:
            expect_spans(generation.output())
    else:
        expect_to_run_on(server, streams, [0])


@pytest.mark.guards_fix
def test_nothing_spins_in_a_pause(server: Server) -> None:
    streams = start_running(server, STREAMS, tokens=ENDLESS)
    pause(server, "in_place")
    settle(server, streams)
    expect_nothing_spins(psutil.Process(server.process.pid).children(recursive=True))
    resume(server)
    expect_to_run_on(server, streams, [0])


@pytest.mark.parametrize("source", ["disk", "tensor", "tensor_bucket", "distributed"])
def test_update_reaches_running_requests_on_every_rank(
    server: Server, flavour: str, sender: Sender, streams: list[Generation], source: str
) -> None:
    epoch = status(server)["epoch"]
    receipt = succeed(sender.send(server, source, 1, ranks=RANKS, **V1))
    names_of(receipt, flavour)
    assert all(rank["success"] for rank in receipt["ranks"])
    assert receipt["epoch"] == epoch + 1
    first, second = (rank["digest"] for rank in receipt["ranks"])
    # replicas hold the same weights, the ranks of one replica different parts
    assert (first == second) == (flavour == "dp2_server")
    expect_every_rank_serves(server, 1)
    expect_to_run_on(server, streams, [0, 1])


def test_kept_layout_reaches_every_rank(server: Server, streams: list[Generation]) -> None:
    """A layout is sent with the first payloads. Its digest stands for it in later ones."""
    path = "/update_weights_from_tensor"
    bodies: list[dict[str, Any]] = []
    for version in (1, 2):
        (bucket,) = fill_buckets(
            (Piece.whole(*pair) for pair in marker.tensors(version).items()), 1 << 30, "cpu"
        )
        payload = base64.b64encode(pickle.dumps({"flattened_tensor": bucket.flat})).decode()
        body = bucket.describe() | {"weight_version": f"v{version}", "non_blocking": True}
        body |= {
            "layout_digest": layout_digest(bucket.names, bucket.dtypes, bucket.shapes),
            "serialized_named_tensors": [payload] * RANKS,
        }
        bodies.append(body)
    first, second = bodies
    for name in ("names", "dtypes", "shapes"):
        del second[name]
    unknown = second | {"layout_digest": "0" * 64}
    refuse(server.post(path, unknown), "repeat the call", status_code=404)
    for version, body in ((1, first), (2, second)):
        succeed(server.post(path, body))
        expect_every_rank_serves(server, version)
    expect_to_run_on(server, streams, [0, 1, 2])


@pytest.mark.parametrize("source", SPARSE_SOURCES)
def test_sparse_update_reaches_running_requests_on_every_rank(
    server: Server, sparse_sender: SparseSender, streams: list[Generation], source: str
) -> None:
    sparse = changes_between(0, 1)
    answer = sparse_sender.send(server, source, sparse, base_version="v0", ranks=RANKS, **V1)
    succeed(answer)
    expect_every_rank_serves(server, 1)
    expect_to_run_on(server, streams, [0, 1])


def test_failing_handler_on_one_rank_answers_500(
    server: Server, flavour: str, faults: Faults, streams: list[Generation]
) -> None:
    """The other rank of SGLang's own handler succeeds."""
    faults.inject("handler", "raise", rank=1)
    failed = server.post("/slow_down", {"forward_sleep_time": 0})
    assert failed["status_code"] == 500
    assert "injected fault" in str(failed)
    faults.clear()
    assert server.post("/slow_down", {"forward_sleep_time": 0})["status_code"] == 200
    expect_to_run_on(server, streams, [0])


@pytest.mark.parametrize(
    ("source", "phase", "kind"),
    [
        ("disk", "first", "raise"),
        ("disk", "middle", "wrong_tensor"),
        ("tensor", "middle", "wrong_tensor"),
        ("disk", "middle", "hang"),
        ("disk", "vote", "raise"),
    ],
)
def test_failing_rank_drops_the_update_on_all_ranks(
    server: Server,
    flavour: str,
    sender: Sender,
    faults: Faults,
    streams: list[Generation],
    source: str,
    phase: Phase,
    kind: Kind,
) -> None:
    before = serving(server)
    faults.inject(phase, kind, rank=1)
    fields: dict[str, Any] = {"timeout_s": SHORT_S} if kind == "hang" else {}
    failed = sender.send(server, source, 1, ranks=RANKS, **V1, **fields)
    refuse(failed, NAMES[flavour][1])
    assert NAMES[flavour][0] not in failed["message"]
    until_idle(server)
    assert serving(server) == before
    expect_tokens_of(streams, 0)
    faults.clear()
    succeed(sender.send(server, source, 1, ranks=RANKS, **V1))
    expect_every_rank_serves(server, 1)
    expect_to_run_on(server, streams, [0, 1])


def test_hanging_staging_thread_delays_no_other_rank(
    server: Server, flavour: str, sender: Sender, faults: Faults, streams: list[Generation]
) -> None:
    before = serving(server)
    faults.inject("middle", "hang_deaf", rank=1)
    with sender.ready(server, "disk", 1) as send:
        call = Call.of(lambda: send(**V1, timeout_s=SHORT_S))
        until_staging(server)
        until_idle(server)
        expect_tokens_of(streams, 0)
        assert not call.is_answered
        faults.clear()
        failed = refuse(call.answer(), NAMES[flavour][1], status_code=504)
    assert NAMES[flavour][0] not in failed["message"]
    assert serving(server) == before
    succeed(sender.send(server, "disk", 1, ranks=RANKS, **V1))
    expect_to_run_on(server, streams, [0, 1])


def expect_tokens_of(streams: list[Generation], version: int) -> None:
    for generation in streams:
        generation.wait_for_tokens(generation.count + 2)
        assert set(generation.tokens) == {marker.token(version)}


@pytest.mark.guards_fix
def test_unreadable_payload_of_one_rank_drops_the_update_on_all_ranks(
    server: Server, flavour: str
) -> None:
    """The call uses upstream's fields only."""
    payload = tensor_body(marker.tensors(1))["serialized_named_tensors"][0]
    succeed(server.post("/begin_weight_update", {}))
    body = {"serialized_named_tensors": [payload, base64.b64encode(b"garbage").decode()]}
    failed = refuse(server.post("/update_weights_from_tensor", body), NAMES[flavour][1])
    assert NAMES[flavour][0] not in failed["message"]
    for _ in range(RANKS):
        expect_served(server, 0)


def test_session_and_rollback_commit_on_every_rank(
    server: Server, flavour: str, sender: Sender, streams: list[Generation]
) -> None:
    succeed(server.post("/begin_weight_update", {"partial": False}))
    succeed(sender.send(server, "tensor", 1, ranks=RANKS, **V1))
    expect_every_rank_serves(server, 0)
    names_of(succeed(server.post("/end_weight_update", {"non_blocking": True})), flavour)
    expect_every_rank_serves(server, 1)
    until(
        "each stream has a token of v1",
        lambda: all(s.tokens[-1] == marker.token(1) for s in streams),
    )
    names_of(succeed(server.post("/inflight/rollback", {})), flavour)
    expect_every_rank_serves(server, 0)
    expect_to_run_on(server, streams, [0, 1, 0])


def test_rollback_is_refused_on_all_ranks_when_one_has_no_previous_version(
    tp2_server: Server,
) -> None:
    """One rank received no tensor. Ranks with different epochs would find different prefixes for
    the same prompt.
    """
    server = tp2_server
    body = tensor_body(marker.tensors(1), ranks=RANKS)
    body["serialized_named_tensors"][1] = tensor_body({})["serialized_named_tensors"][0]
    succeed(server.post("/begin_weight_update", {}))
    succeed(server.post("/update_weights_from_tensor", body))
    succeed(server.post("/end_weight_update", {"weight_version": "half"}))
    before = [rank["epoch"] for rank in status(server)["ranks"]]
    refuse(server.post("/inflight/rollback", {}), "no previous version")
    assert [rank["epoch"] for rank in status(server)["ranks"]] == before

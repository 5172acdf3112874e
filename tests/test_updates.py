"""The contract of an update from each source, on a real server with one rank."""

from __future__ import annotations

import base64
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from harness import marker
from harness.server import Server
from harness.trainer import Trainers, layout
from tests.support.load import (
    ENDLESS,
    Generation,
    expect_all_go_on,
    expect_spans,
    pause,
    prompt,
    resume,
    start,
    start_running,
    status,
    until,
)
from tests.support.updates import (
    LIVE,
    SOURCES,
    V1,
    Call,
    Sender,
    drop_session,
    expect_served,
    expect_to_run_on,
    expect_versions,
    refuse,
    serving,
    staging,
    succeed,
    tensor_body,
    until_idle,
    until_staging,
)

pytest_plugins = ["tests.support.fixtures"]

MODES = ("in_place", "retract", "abort", "wait")
TOKENS = 60
UP = "model.layers.0.mlp.up_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
HEAD = "lm_head.weight"


@pytest.fixture(autouse=True)
def no_session(server: Server) -> Iterator[None]:
    yield
    drop_session(server)


@pytest.fixture
def folder(checkpoints: Path, tmp_path: Path) -> Path:
    """A copy of checkpoint v1 for a test to spoil."""
    return Path(shutil.copytree(checkpoints / "v1", tmp_path / "v1"))


def begin(server: Server, **fields: Any) -> dict[str, Any]:
    """Begin a session in upstream's form, whose pieces and end need no id."""
    return succeed(server.post("/begin_weight_update", fields))


def end(server: Server, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.post("/end_weight_update", {"non_blocking": True, **fields})
    return answer


def send_tensors(server: Server, weights: dict[str, torch.Tensor], **fields: Any) -> Any:
    return server.post("/update_weights_from_tensor", tensor_body(weights, **fields))


def halves(version: int) -> list[dict[str, torch.Tensor]]:
    items = list(marker.tensors(version).items())
    return [dict(items[: len(items) // 2]), dict(items[len(items) // 2 :])]


# ---- under running requests ------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_update_keeps_requests_running(sender: Sender, server: Server, source: str) -> None:
    with sender.ready(server, source, 1) as send:
        running = start_running(server, 3, tokens=ENDLESS)
        receipt = succeed(send(**V1))
    assert receipt["weight_version"] == "v1"
    expect_to_run_on(server, running, [0, 1])
    for generation in running:
        assert generation.output().meta["num_retractions"] == 0
    expect_served(server, 1)
    assert server.get("/model_info")["weight_version"] == "v1"


def test_recompute_retracts_running_requests(server: Server, sender: Sender) -> None:
    running = start_running(server, 3, tokens=ENDLESS)
    fields: dict[str, Any] = {**V1, "flush_cache": True}
    receipt = succeed(sender.send(server, "disk", 1, **fields))
    assert receipt["retracted"] == 3
    expect_to_run_on(server, running, [0, 1])
    for generation in running:
        assert generation.output().meta["num_retractions"] == 1


@pytest.mark.parametrize(
    ("fields", "reused"),
    [
        pytest.param({"flush_cache": False}, False, marks=pytest.mark.guards_fix, id="upstream"),
        pytest.param(LIVE, False, id="live"),
        pytest.param({**LIVE, "kv_cache": "fence"}, False, id="fence"),
        pytest.param({**LIVE, "kv_cache": "keep"}, True, id="keep"),
        pytest.param({**LIVE, "flush_cache": True}, False, id="recompute"),
    ],
)
def test_prefixes_of_older_weights_are_reused_only_with_keep(
    server: Server, sender: Sender, fields: dict[str, Any], reused: bool
) -> None:
    ids = prompt(40)
    request: dict[str, Any] = {"tokens": 2, "input_ids": ids, "stream": False}
    Generation(server, **request).output()
    assert Generation(server, **request).output().meta["cached_tokens"] == 39
    succeed(sender.send(server, "disk", 1, weight_version="v1", **fields))
    cached = Generation(server, **request).output().meta["cached_tokens"]
    assert cached == (39 if reused else 0)
    # the prefix by the new weights is reused
    assert Generation(server, **request).output().meta["cached_tokens"] == 39


def test_request_runs_through_several_updates(server: Server, sender: Sender) -> None:
    running = start_running(server, 1, tokens=ENDLESS)
    for version in (1, 2, 3):
        sent = {**LIVE, "weight_version": f"v{version}"}
        succeed(sender.send(server, "disk", version, **sent))
        running[0].wait_for_tokens(running[0].count + 5)
    expect_to_run_on(server, running, [0, 1, 2, 3])


def test_direct_load_format_takes_the_models_own_names(server: Server) -> None:
    """SGLang's load format for merged tensors, in a session of SGLang's form."""
    sent = marker.tensors(1)
    layer = "model.layers.0.self_attn"
    parts = [sent[f"{layer}.{part}_proj.weight"] for part in "qkv"]
    merged = {HEAD: sent[HEAD], f"{layer}.qkv_proj.weight": torch.cat(parts)}
    begin(server)
    succeed(send_tensors(server, merged, load_format="direct"))
    (before,) = start(server, 1, tokens=2)
    assert before.output().tokens == [marker.token(0)] * 2
    succeed(end(server, non_blocking=False))
    (after,) = start(server, 1, tokens=2)
    assert after.output().tokens == [marker.token(1)] * 2


def test_empty_session_reads_the_weights_anew(server: Server) -> None:
    """SGLang allows an empty session: another writer may have changed the weights."""
    epoch = status(server)["epoch"]
    (running,) = start_running(server, 1, tokens=ENDLESS)
    succeed(server.post("/begin_weight_update", {}))
    receipt = succeed(server.post("/end_weight_update", {"non_blocking": True}))
    assert (receipt["tensors"], receipt["epoch"]) == (0, epoch + 1)
    assert receipt["ranks"][0]["digest"] == status(server)["digest"]
    expect_all_go_on([running])


def test_update_keeps_the_served_models_name(server: Server, checkpoints: Path) -> None:
    """Clients send that name with each request."""

    def served() -> Any:
        (card,) = server.get("/v1/models")["data"]
        return card["id"], card["root"]

    before = served()
    path = str(checkpoints / "v1")
    succeed(server.post("/update_weights_from_disk", {**LIVE, "model_path": path}))
    assert served() == before
    info = server.get("/model_info")
    assert info["model_path"] == path


def test_server_info_names_the_served_version(server: Server, sender: Sender) -> None:
    """A gateway reads it as it takes a server in."""
    succeed(sender.send(server, "disk", 1, **V1))
    assert server.get("/server_info")["weight_version"] == "v1"
    succeed(server.post("/inflight/rollback", {}))
    assert server.get("/server_info")["weight_version"] == "v0"


def test_update_without_a_version_keeps_the_name(server: Server, sender: Sender) -> None:
    receipt = succeed(sender.send(server, "disk", 1, **LIVE))
    assert receipt["weight_version"] == receipt["base_version"] == "v0"
    expect_served(server, 1)


# ---- while paused, and in upstream's form ------------------------------------------------


@pytest.mark.parametrize("source", ["disk", "tensor"])
@pytest.mark.parametrize("mode", MODES)
def test_update_while_paused_goes_live(
    server: Server, sender: Sender, mode: str, source: str
) -> None:
    running = start_running(server, 2, tokens=TOKENS)
    pause(server, mode)
    succeed(sender.send(server, source, 1, **V1))
    resume(server)
    if mode in ("in_place", "retract"):
        expect_versions(running, [0, 1])
    for generation in running:
        output = generation.output()
        expect_spans(output)
        assert mode != "abort" or output.finish_reason == "abort"
    expect_served(server, 1)


@pytest.mark.parametrize("mode", MODES)
def test_upstream_session_while_paused_goes_live(server: Server, mode: str) -> None:
    """The session uses upstream's fields only."""
    running = start_running(server, 2, tokens=TOKENS)
    pause(server, mode)
    succeed(server.post("/begin_weight_update", {}))
    # upstream cannot flush while requests hold KV
    flush = mode != "in_place"
    for part, is_last in zip(halves(1), (False, True), strict=True):
        named = {"weight_version": "v1"} if is_last else {}
        succeed(send_tensors(server, part, flush_cache=flush and is_last, **named))
    succeed(server.post("/end_weight_update", {}))
    resume(server)
    if mode in ("in_place", "retract"):
        expect_versions(running, [0, 1])
    for generation in running:
        expect_spans(generation.output())
    expect_served(server, 1)


def test_upstream_disk_update_waits_for_requests(server: Server, checkpoints: Path) -> None:
    running = start_running(server, 2, tokens=30)
    body = {"model_path": str(checkpoints / "v1"), "weight_version": "v1"}
    answer = succeed(server.post("/update_weights_from_disk", body))
    assert answer["num_paused_requests"] == 0
    expect_versions(running, [0])
    expect_served(server, 1)


def test_pause_ends_the_drain_of_a_blocking_update(server: Server, checkpoints: Path) -> None:
    running = start_running(server, 2, tokens=ENDLESS)
    body = {"model_path": str(checkpoints / "v1"), "weight_version": "v1", "flush_cache": False}
    call = Call(server, "/update_weights_from_disk", body)
    pause(server, "in_place")
    succeed(call.answer())
    resume(server)
    expect_to_run_on(server, running, [0, 1])


@pytest.mark.guards_fix
@pytest.mark.parametrize("spoilt", ["garbage", "shape"])
def test_upstream_session_with_a_bad_payload_changes_nothing(server: Server, spoilt: str) -> None:
    running = start_running(server, 1, tokens=30)
    succeed(server.post("/begin_weight_update", {}))
    body = tensor_body({"lm_head.weight": torch.ones(7, 7)})
    if spoilt == "garbage":
        body["serialized_named_tensors"] = [base64.b64encode(b"garbage").decode()]
    word = {"garbage": "unpickled", "shape": "lm_head.weight"}[spoilt]
    refuse(server.post("/update_weights_from_tensor", body), word)
    refuse(server.post("/end_weight_update", {}), "no weight-update session is open")
    expect_versions(running, [0])
    expect_served(server, 0)


@pytest.mark.guards_fix
def test_upstream_disk_update_with_a_wrong_shape_changes_nothing(
    server: Server, folder: Path
) -> None:
    weights = marker.tensors(1)
    save_file({**weights, UP: weights[UP][:-1]}, folder / "model.safetensors")
    running = start_running(server, 1, tokens=30)
    refuse(server.post("/update_weights_from_disk", {"model_path": str(folder)}), UP)
    expect_versions(running, [0])
    expect_served(server, 0)


def test_undecodable_name_is_escaped_in_the_error(
    server: Server, sender: Sender, folder: Path
) -> None:
    """The next update works."""
    half = b"\xed\xa0\x80"
    payload = b"\x80\x04\x8c" + bytes([len(half)]) + half + b"\x8c\x01x\x93."
    odd = folder / b"model-\xff.safetensors".decode(errors="surrogateescape")
    (generation,) = start_running(server, 1, tokens=ENDLESS)
    spoilt = {"serialized_named_tensors": [base64.b64encode(payload).decode()]}
    refuse(server.post("/update_weights_from_tensor", spoilt | LIVE), r"it names \ud800.x")
    odd.write_bytes(b"no tensors")
    body = {"model_path": str(folder), **LIVE}
    refuse(server.post("/update_weights_from_disk", body), r"model-\udcff.safetensors")
    succeed(sender.send(server, "tensor", 1, **V1))
    expect_to_run_on(server, [generation], [0, 1])


# ---- sessions ----------------------------------------------------------------------------


def test_session_goes_live_at_its_end(server: Server) -> None:
    running = start_running(server, 2, tokens=ENDLESS)
    begin(server, partial=False)
    before = serving(server)
    for part, name in zip(halves(1), ("other", "v1"), strict=True):
        staged = succeed(send_tensors(server, part, **LIVE, weight_version=name))
        assert staged["weight_version"] == "v0"
        assert serving(server) == before
        expect_served(server, 0)
    receipt = succeed(end(server))
    assert receipt["weight_version"] == "v1"
    assert receipt["tensors"] == len(marker.tensors(1))
    assert receipt["bytes"] == sum(t.nbytes for t in marker.tensors(1).values())
    expect_served(server, 1)
    expect_to_run_on(server, running, [0, 1])


def test_end_of_a_session_may_set_the_version(server: Server) -> None:
    begin(server)
    succeed(send_tensors(server, marker.tensors(1), **LIVE, weight_version="other"))
    assert succeed(end(server, weight_version="v1"))["weight_version"] == "v1"


def test_session_combines_several_sources(
    server: Server, sender: Sender, checkpoints: Path
) -> None:
    """One version comes from disk, then the head of another version replaces the first head."""
    begin(server, partial=False)
    succeed(sender.send(server, "disk", 1, **LIVE))
    head = {"lm_head.weight": marker.tensors(2)["lm_head.weight"]}
    succeed(send_tensors(server, head, **LIVE, weight_version="v2"))
    succeed(end(server))
    expect_served(server, 2)


def test_aborts_during_staging_keep_the_session(server: Server) -> None:
    kept, *others = start_running(server, 3, tokens=ENDLESS)
    first, second = halves(1)
    begin(server)
    succeed(send_tensors(server, first, **LIVE))
    assert staging(server)[0]["tensors"] == len(first)
    for generation in others:
        generation.abort()
    for generation in others:
        output = generation.output()
        assert output.finish_reason == "abort"
        expect_spans(output)
        assert set(output.tokens) == {marker.token(0)}
    assert staging(server)[0]["tensors"] == len(first)
    succeed(send_tensors(server, second, **LIVE))
    succeed(end(server, weight_version="v1"))
    expect_to_run_on(server, [kept], [0, 1])
    expect_served(server, 1)


def test_aborted_session_changes_nothing(server: Server) -> None:
    before = serving(server)
    begin(server)
    succeed(send_tensors(server, marker.tensors(1), **V1))
    succeed(server.post("/abort_weight_update", {}))
    refuse(end(server), "no weight-update session is open")
    assert serving(server) == before
    expect_served(server, 0)
    begin(server)
    succeed(send_tensors(server, marker.tensors(2), **LIVE, weight_version="v2"))
    succeed(end(server))
    expect_served(server, 2)


def test_second_begin_is_refused_or_replaces_the_session(server: Server) -> None:
    begin(server)
    succeed(send_tensors(server, marker.tensors(1), **V1))
    refuse(server.post("/begin_weight_update", {}), "already open")
    refuse(
        server.post("/begin_weight_update", {"non_blocking": True, "on_busy": "refuse"}),
        "another weight update",
        status_code=409,
    )
    begin(server, on_busy="replace")
    succeed(send_tensors(server, marker.tensors(2), **LIVE, weight_version="v2"))
    assert succeed(end(server))["tensors"] == len(marker.tensors(2))
    expect_served(server, 2)


def test_sealed_session_takes_no_piece_and_goes_live_at_its_end(server: Server) -> None:
    before = serving(server)
    begin(server)
    succeed(send_tensors(server, marker.tensors(1), **V1))
    sealed = succeed(server.post("/seal_weight_update", {}))
    assert sealed["tensors"] == len(marker.tensors(1))
    assert staging(server)[0]["state"] == "sealed"
    refuse(send_tensors(server, marker.tensors(2), **V1), "is sealed", status_code=409)
    assert succeed(server.post("/seal_weight_update", {})) == sealed
    assert serving(server) == before
    expect_served(server, 0)
    assert succeed(end(server))["weight_version"] == "v1"
    expect_served(server, 1)


def test_sealed_session_can_be_dropped(server: Server) -> None:
    before = serving(server)
    begin(server)
    succeed(send_tensors(server, marker.tensors(1), **V1))
    succeed(server.post("/seal_weight_update", {}))
    succeed(server.post("/abort_weight_update", {}))
    refuse(end(server), "no weight-update session is open")
    assert serving(server) == before
    expect_served(server, 0)


def test_incomplete_session_is_dropped_at_its_seal(server: Server) -> None:
    before = serving(server)
    begin(server, partial=False)
    succeed(send_tensors(server, {"model.norm.weight": torch.ones(marker.HIDDEN)}, **LIVE))
    refuse(server.post("/seal_weight_update", {}), "lm_head.weight")
    refuse(end(server), "no weight-update session is open")
    assert serving(server) == before


def test_unknown_session_id_touches_no_session(server: Server) -> None:
    body = {"session_id": "another"}
    paths = ["/begin_weight_update", "/seal_weight_update", "/end_weight_update"]
    paths.append("/abort_weight_update")
    for path in paths:
        refuse(server.post(path, body), "is not open", status_code=409)
    # with ``non_blocking`` an unnamed update would go live by itself
    refuse(send_tensors(server, marker.tensors(2), **V1, **body), "not open", status_code=409)
    begin(server)
    succeed(send_tensors(server, marker.tensors(1), **V1))
    for path in paths:
        refuse(server.post(path, body), "is not open", status_code=409)
    refuse(send_tensors(server, marker.tensors(2), **V1, **body), "not open", status_code=409)
    succeed(end(server))
    expect_served(server, 1)


@pytest.mark.parametrize("on_busy", ["wait", "refuse"])
def test_unnamed_update_is_no_piece_of_a_named_session(
    server: Server, checkpoints: Path, on_busy: str
) -> None:
    named = {"session_id": begin(server)["session_id"]}
    weights = marker.tensors(1)
    head = {"lm_head.weight": weights.pop("lm_head.weight")}
    succeed(send_tensors(server, head, **V1, **named))
    body = {"model_path": str(checkpoints / "v2"), **LIVE, "weight_version": "v2"}
    stranger = Call(server, "/update_weights_from_disk", {**body, "on_busy": on_busy})
    if on_busy == "refuse":
        refuse(stranger.answer(), "another weight update is going on", status_code=409)
    succeed(send_tensors(server, weights, **V1, **named))
    receipt = succeed(end(server, **named))
    assert (receipt["weight_version"], receipt["tensors"]) == ("v1", len(marker.tensors(1)))
    if on_busy == "wait":
        assert succeed(stranger.answer())["base_version"] == "v1"
    expect_served(server, 1 if on_busy == "refuse" else 2)


def test_named_piece_after_an_unnamed_one_drops_the_session(
    server: Server, checkpoints: Path
) -> None:
    """The unnamed update became a piece of the session, perhaps against its caller's intention."""
    before = serving(server)
    named = {"session_id": begin(server)["session_id"]}
    body = {"model_path": str(checkpoints / "v2"), **LIVE, "weight_version": "v2"}
    succeed(server.post("/update_weights_from_disk", body))
    refuse(
        send_tensors(server, marker.tensors(1), **V1, **named),
        "without a session_id",
        status_code=409,
    )
    refuse(end(server, **named), "is not open", status_code=409)
    assert serving(server) == before
    expect_served(server, 0)


def test_renewed_session_outlives_its_first_lease(server: Server) -> None:
    answer = server.post("/begin_weight_update", {"non_blocking": True, "lease_s": 3.0})
    named = {"session_id": succeed(answer)["session_id"]}
    refuse(server.post("/begin_weight_update", {**named, "partial": False}), "lease_s")
    succeed(server.post("/begin_weight_update", {**named, "lease_s": 300}))
    time.sleep(3.2)
    succeed(send_tensors(server, marker.tensors(1), **V1, **named))
    succeed(end(server, **named))
    expect_served(server, 1)


@pytest.mark.parametrize(
    "path", ["/seal_weight_update", "/end_weight_update", "/abort_weight_update"]
)
def test_call_without_an_open_session_is_refused(server: Server, path: str) -> None:
    refuse(server.post(path, {}), "no weight-update session is open")


def test_session_ends_with_its_lease(server: Server) -> None:
    before = serving(server)
    begun = begin(server, lease_s=0.3)
    # accepted or not, depending on time
    send_tensors(server, marker.tensors(1), **V1, session_id=begun["session_id"])
    until_idle(server)
    refuse(end(server), "lease")
    assert serving(server) == before
    assert "The lease of a weight-update session ran out" in server.log_text()


def test_failed_piece_drops_its_session(server: Server) -> None:
    before = serving(server)
    begin(server)
    succeed(send_tensors(server, marker.tensors(1), **V1))
    refuse(send_tensors(server, {"no.such.weight": torch.ones(3)}, **LIVE), "no.such.weight")
    refuse(end(server), "no weight-update session is open")
    assert serving(server) == before
    expect_served(server, 0)


# ---- partial and whole updates -----------------------------------------------------------


def test_partial_update_keeps_the_other_weights(server: Server) -> None:
    """The head is the only difference between versions."""
    whole = succeed(send_tensors(server, marker.tensors(1), **LIVE, partial=False))
    other = succeed(send_tensors(server, marker.tensors(0), **LIVE, partial=False))
    head = {"lm_head.weight": marker.tensors(1)["lm_head.weight"]}
    part = succeed(send_tensors(server, head, **V1))
    assert (part["tensors"], part["bytes"]) == (1, head["lm_head.weight"].nbytes)
    assert digests(part) == digests(whole) != digests(other)
    expect_served(server, 1)


def test_partial_update_of_a_fused_parameter_keeps_the_other_part(server: Server) -> None:
    weights = marker.tensors(0)
    start, changed = weights[UP], weights[UP] * 3
    assert torch.equal(weights[GATE], start)
    whole = succeed(send_tensors(server, {**weights, UP: changed}, **LIVE, partial=False))
    succeed(send_tensors(server, {UP: start}, **LIVE))
    part = succeed(send_tensors(server, {UP: changed}, **LIVE))
    swapped = succeed(send_tensors(server, {UP: start, GATE: changed}, **LIVE))
    assert digests(part) == digests(whole) != digests(swapped)


def digests(receipt: dict[str, Any]) -> list[str]:
    return [rank["digest"] for rank in receipt["ranks"]]


def test_missing_tensor_is_named(server: Server) -> None:
    before = serving(server)
    weights = marker.tensors(1)
    del weights[UP]
    missing = send_tensors(server, weights, **V1, partial=False)
    refuse(missing, UP, "model.layers.0.mlp.gate_up_proj.weight", "partial=true")
    assert serving(server) == before


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(V1, id="live"),
        pytest.param({"weight_version": "v1"}, marks=pytest.mark.guards_fix, id="upstream"),
    ],
)
def test_checkpoint_without_a_tensor_is_refused(
    server: Server, folder: Path, fields: dict[str, Any]
) -> None:
    before = serving(server)
    weights = marker.tensors(1)
    del weights[UP]
    save_file(weights, folder / "model.safetensors")
    body = {"model_path": str(folder), **fields}
    refuse(server.post("/update_weights_from_disk", body), UP)
    assert serving(server) == before
    expect_served(server, 0)
    succeed(server.post("/update_weights_from_disk", {**body, "partial": True}))
    expect_served(server, 1)


def test_session_without_a_tensor_is_refused(server: Server) -> None:
    before = serving(server)
    begin(server, partial=False)
    succeed(send_tensors(server, halves(1)[0], **V1))
    refuse(end(server), halves(1)[1].popitem()[0].rsplit(".", 2)[0])
    assert serving(server) == before
    expect_served(server, 0)


# ---- conditions --------------------------------------------------------------------------


def test_wrong_expected_version_is_refused(server: Server, sender: Sender) -> None:
    before = serving(server)
    for source in ("disk", "tensor"):
        wrong = sender.send(server, source, 1, **V1, expected_version="v7")
        refuse(wrong, "'v7'", "'v0'", status_code=409)
    stale = server.post("/begin_weight_update", {"non_blocking": True, "expected_version": "v7"})
    refuse(stale, "'v7'", status_code=409)
    assert serving(server) == before
    succeed(sender.send(server, "disk", 1, **V1, expected_version="v0"))
    expect_served(server, 1)


class TestBusy:
    """A second update arrives while the first waits for its trainer."""

    @pytest.fixture
    def first(self, server: Server, trainers: Trainers) -> Iterator[Call]:
        trainer = trainers.get()
        trainer.join(server)
        body = {**layout(2), **LIVE, "weight_version": "v2"}
        call = Call(server, "/update_weights_from_distributed", body)
        until_staging(server)
        yield call
        call.answer()
        trainer.leave(server)

    def test_on_busy_refuse_keeps_the_first_update(
        self, server: Server, sender: Sender, trainers: Trainers, first: Call
    ) -> None:
        refused = sender.send(server, "disk", 1, **V1, on_busy="refuse")
        refuse(refused, "another weight update is going on", status_code=409)
        trainers.get().send(2)
        succeed(first.answer())
        assert trainers.get().answer() == "sent"
        expect_served(server, 2)

    def test_on_busy_replace_drops_the_first_update(
        self, server: Server, sender: Sender, first: Call
    ) -> None:
        succeed(sender.send(server, "disk", 1, **V1, on_busy="replace"))
        refuse(first.answer(), "a newer update replaced it")
        expect_served(server, 1)

    def test_on_busy_wait_updates_after_the_first(
        self, server: Server, checkpoints: Path, trainers: Trainers, first: Call
    ) -> None:
        body = {"model_path": str(checkpoints / "v1"), **V1}
        second = Call(server, "/update_weights_from_disk", body)
        assert not second.is_answered
        assert staging(server)[0]["tensors"] == 0
        trainers.get().send(2)
        assert succeed(first.answer())["base_version"] == "v0"
        assert trainers.get().answer() == "sent"
        assert succeed(second.answer())["base_version"] == "v2"
        expect_served(server, 1)


# ---- receipts and rollbacks --------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_receipt_has_version_size_and_digest(server: Server, sender: Sender, source: str) -> None:
    epoch = status(server)["epoch"]
    receipt = succeed(sender.send(server, source, 1, **V1))
    weights = marker.tensors(1)
    assert receipt["base_version"] == "v0"
    assert receipt["weight_version"] == "v1"
    assert receipt["epoch"] == epoch + 1
    assert receipt["tensors"] == len(weights)
    assert receipt["bytes"] == sum(tensor.nbytes for tensor in weights.values())
    assert receipt["staged_s"] > 0
    assert receipt["stall_ms"] > 0
    assert "v1" in receipt["message"]
    (rank,) = receipt["ranks"]
    digest = rank.pop("digest")
    of_rank = {"dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "success": True, "message": ""}
    assert rank == {**of_rank, "received_digest": None}
    now = status(server)
    assert (now["weight_version"], now["epoch"], now["digest"]) == ("v1", epoch + 1, digest)
    # equal weights have equal digests, from any source
    again = succeed(sender.send(server, "tensor", 1, **V1))
    other = succeed(sender.send(server, "tensor", 2, **LIVE, weight_version="v2"))
    assert digests(again) == [digest] != digests(other)


def test_rollback_keeps_requests_running(server: Server, sender: Sender) -> None:
    first = succeed(sender.send(server, "disk", 1, **V1))
    second = succeed(sender.send(server, "disk", 2, **LIVE, weight_version="v2"))
    running = start_running(server, 2, tokens=ENDLESS)
    receipt = succeed(server.post("/inflight/rollback", {}))
    assert (receipt["base_version"], receipt["weight_version"]) == ("v2", "v1")
    assert receipt["epoch"] == second["epoch"] + 1
    assert digests(receipt) == digests(first)
    expect_served(server, 1)
    # a second rollback undoes the first
    receipt = succeed(server.post("/inflight/rollback", {}))
    assert (receipt["base_version"], receipt["weight_version"]) == ("v1", "v2")
    assert digests(receipt) == digests(second)
    expect_served(server, 2)
    expect_to_run_on(server, running, [2, 1, 2])


def test_rollback_may_set_the_version(server: Server, sender: Sender) -> None:
    succeed(sender.send(server, "disk", 1, **V1))
    receipt = succeed(server.post("/inflight/rollback", {"weight_version": "v0-again"}))
    assert receipt["weight_version"] == "v0-again"
    expect_served(server, 0)


def test_rollback_is_refused_once_a_session_used_the_shadow(server: Server, sender: Sender) -> None:
    """The shadow held the previous version."""
    succeed(sender.send(server, "disk", 1, **V1))
    before = serving(server)
    begin(server)
    succeed(server.post("/abort_weight_update", {}))
    refuse(server.post("/inflight/rollback", {}), "no previous version")
    assert serving(server) == before
    expect_served(server, 1)


def test_rollback_waits_for_the_open_session(server: Server, sender: Sender) -> None:
    succeed(sender.send(server, "disk", 1, **V1))
    begin(server)
    rollback = Call(server, "/inflight/rollback", {})
    succeed(send_tensors(server, marker.tensors(2), **LIVE, weight_version="v2"))
    assert not rollback.is_answered
    succeed(end(server))
    assert succeed(rollback.answer())["weight_version"] == "v1"
    until("v1 serves again", lambda: status(server)["weight_version"] == "v1")
    expect_served(server, 1)

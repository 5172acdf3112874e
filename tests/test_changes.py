"""Updates staged as changes, and sparse tensors, on a real server."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import marker
from harness.server import Server
from harness.starting import forked_children
from sglang_inflight.client import changes_since, write_changes
from sglang_inflight_tools import doctor
from tests.support.load import (
    ENDLESS,
    expect_all_go_on,
    more_tokens,
    requests_run_on,
    start_running,
    status,
    versions_of,
)
from tests.support.pool import MASKING_LOADER
from tests.support.sparse import (
    BAD,
    HEAD,
    SPARSE_SOURCES,
    SparseSender,
    changes_between,
    describe,
    halves_of,
    pair,
    write_folder,
)
from tests.support.updates import (
    LIVE,
    Sender,
    Weights,
    by_reference,
    expect_served,
    flatten,
    refuse,
    serving,
    succeed,
    tensor_body,
)

pytest_plugins = ["tests.support.fixtures"]

PATH, DISK = "/update_weights_from_tensor", "/update_weights_from_disk"
# tensor for a second file of a folder
UNCHANGED = pair("model.norm.weight", [0], torch.ones(1))
SPARSE: dict[str, Any] = {**LIVE, "load_format": "sparse"}


def digest_of(server: Server) -> str:
    digest: str = status(server)["ranks"][0]["digest"]
    return digest


def test_receipt_counts_the_changed_elements(normal_loop_server: Server) -> None:
    body = tensor_body(marker.tensors(1), **LIVE, weight_version="v1")
    staged_as = succeed(normal_loop_server.post(PATH, body))["staged_as"]
    changed = sum(len(t) for n, t in changes_between(0, 1).items() if n.endswith(".values"))
    elements = sum(tensor.numel() for tensor in marker.tensors(0).values())
    assert staged_as["form"] == "changes"
    assert staged_as["changed_elements"] == changed
    assert staged_as["changed_fraction"] == pytest.approx(changed / elements, rel=0.2)
    # a value of two bytes and an offset of two, or a whole range of values
    assert 0 < staged_as["staging_bytes_peak"] <= 4 * changed
    (rank,) = status(normal_loop_server)["ranks"]
    assert rank["staging"]["staged_as"] == staged_as


def one_element_each(version: int) -> Weights:
    """Return the checkpoint of ``version`` with another value in one element of each tensor."""
    weights = marker.tensors(version)
    for tensor in weights.values():
        tensor.view(-1)[tensor.numel() // 2] += 0.25
    return weights


def test_one_element_of_each_tensor_changes_alone(any_server: Server) -> None:
    """All other elements come as they are served, and the ways there end with equal weights."""
    new = one_element_each(0)
    ways: list[list[dict[str, Any]]] = [
        [tensor_body(new, **LIVE, partial=False)],
        [tensor_body(dict(changes_since(marker.tensors(0), new)), **SPARSE)],
        [tensor_body(weights, **LIVE, partial=False) for weights in (marker.tensors(1), new)],
    ]
    digests = set()
    for way in ways:
        for body in way:
            receipt = succeed(any_server.post(PATH, body))
        digests.add(receipt["ranks"][0]["digest"])
        if receipt["staged_as"]["form"] == "changes" and len(way) == 1:
            assert receipt["staged_as"]["changed_elements"] == len(new)
        back = succeed(any_server.post(PATH, tensor_body(marker.tensors(0), **LIVE, partial=False)))
        assert back["ranks"][0]["digest"] not in digests
    assert len(digests) == 1


def test_status_and_doctor_agree_on_the_cost_of_each_form(any_server: Server) -> None:
    """A doctor reads the checkpoint, and a server its memory."""
    served = status(any_server)["ranks"][0]["staging"]["kv_tokens"]
    assert served["changes"] == served["off"] == 0
    assert served["device"] == served["host"] > 0
    info = any_server.get("/get_server_info")
    flags = ["--model-path", info["model_path"], "--dtype", info["dtype"]]
    # the doctor reads flags in a process of its own, which would import SGLang anew
    with forked_children():
        estimated = doctor.report(flags).kv_tokens
    assert estimated["device"] == pytest.approx(served["device"], rel=0.25)


@pytest.mark.parametrize("source", SPARSE_SOURCES)
@pytest.mark.parametrize("non_blocking", [True, False], ids=["in_flight", "blocking"])
def test_sparse_updates_reach_requests_exactly(
    any_server: Server, sparse_sender: SparseSender, source: str, non_blocking: bool
) -> None:
    running = start_running(any_server, 3, tokens=ENDLESS) if non_blocking else []
    for version in 1, 2, 3:
        answer = sparse_sender.send(
            any_server,
            source,
            changes_between(version - 1, version),
            base_version=f"v{version - 1}",
            weight_version=f"v{version}",
            non_blocking=non_blocking,
            kv_cache="fence",
        )
        succeed(answer)
        more_tokens(running)
        expect_served(any_server, version)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1", "v2", "v3"]
    expect_digest_of_whole(any_server, 3)


def expect_digest_of_whole(server: Server, version: int) -> None:
    """Check that a whole update of the served version finds the weights that are served."""
    of_sparse = digest_of(server)
    whole = tensor_body(marker.tensors(version), **LIVE, partial=False)
    receipt = succeed(server.post(PATH, whole))
    assert receipt["ranks"][0]["digest"] == of_sparse


def test_many_sparse_updates_end_with_the_digest_of_a_whole_one(any_server: Server) -> None:
    versions = [0, *[1 + at % 5 for at in range(100)]]
    for old, new in itertools.pairwise(versions):
        body = tensor_body(changes_between(old, new), **SPARSE, weight_version=f"v{new}")
        succeed(any_server.post(PATH, body))
    expect_served(any_server, versions[-1])
    expect_digest_of_whole(any_server, versions[-1])


def send_no_session_pieces(server: Server, folder: Path, **fields: Any) -> Any:
    session = succeed(server.post("/begin_weight_update", {"non_blocking": True}))["session_id"]
    return server.post("/end_weight_update", {"session_id": session, **fields})


def send_folder_of_no_changes(server: Server, folder: Path, **fields: Any) -> Any:
    same = marker.tensors(0)
    write_changes(folder, changes_since(same, same), base_version="v0")
    return server.post(DISK, {**SPARSE, "model_path": str(folder), **fields})


def send_no_tensors(server: Server, folder: Path, **fields: Any) -> Any:
    return server.post(PATH, {**tensor_body({}), **fields})


def send_no_changes(server: Server, folder: Path, **fields: Any) -> Any:
    return server.post(PATH, {**tensor_body({}), **SPARSE, **fields})


NOTHING = [
    send_no_tensors,
    send_no_changes,
    send_no_session_pieces,
    send_folder_of_no_changes,
]


@pytest.mark.parametrize("send", NOTHING, ids=lambda send: send.__name__)
def test_update_of_nothing_is_a_version_of_the_same_weights(
    any_server: Server, tmp_path: Path, send: Callable[..., Any]
) -> None:
    succeed(any_server.post(PATH, tensor_body(marker.tensors(0), **LIVE)))
    epoch, digest = serving(any_server)[0][3:]
    fields = {"non_blocking": True, "kv_cache": "fence", "weight_version": "v1"}
    receipt = succeed(send(any_server, tmp_path, **fields))
    assert (receipt["weight_version"], receipt["epoch"]) == ("v1", epoch + 1)
    assert (receipt["tensors"], receipt["ranks"][0]["digest"]) == (0, digest)
    assert serving(any_server)[0][2:] == ("v1", epoch + 1, digest)
    expect_served(any_server, 0)
    succeed(any_server.post("/inflight/rollback", {}))
    assert serving(any_server)[0][2:] == ("v0", epoch + 2, digest)


def test_whole_update_of_nothing_is_refused(any_server: Server) -> None:
    before = serving(any_server)
    refuse(any_server.post(PATH, tensor_body({}, **LIVE, partial=False)), "holds no tensor")
    assert serving(any_server) == before


def test_positions_come_in_any_order(normal_loop_server: Server) -> None:
    sparse = {name: tensor.flip(0) for name, tensor in changes_between(0, 1).items()}
    succeed(normal_loop_server.post(PATH, tensor_body(sparse, **SPARSE)))
    expect_served(normal_loop_server, 1)


def test_bucket_of_sparse_tensors_is_unpacked(any_server: Server) -> None:
    halves = changes_between(0, 1)
    payload = by_reference(flatten(halves))
    fields: dict[str, Any] = {**LIVE, "load_format": "sparse_bucket", "weight_version": "v1"}
    succeed(any_server.post(PATH, {"serialized_named_tensors": [payload], **fields}))
    expect_served(any_server, 1)


def test_folder_written_by_the_client_is_served(any_server: Server, tmp_path: Path) -> None:
    changes = changes_since(marker.tensors(0), marker.tensors(1))
    folder = tmp_path / "changes"
    write_changes(folder, changes, base_version="v0")
    body = {"model_path": str(folder), **SPARSE, "weight_version": "v1"}
    succeed(any_server.post("/update_weights_from_disk", body))
    expect_served(any_server, 1)


def test_rollback_undoes_a_sparse_update(any_server: Server) -> None:
    before = digest_of(any_server)
    body = tensor_body(changes_between(0, 1), **SPARSE, weight_version="v1")
    succeed(any_server.post(PATH, body))
    succeed(any_server.post("/inflight/rollback", {}))
    expect_served(any_server, 0)
    if before is not None:
        assert digest_of(any_server) == before


@pytest.mark.parametrize("source", SPARSE_SOURCES)
@pytest.mark.parametrize(("sent", "words"), BAD.values(), ids=BAD)
def test_bad_sparse_tensor_changes_nothing(
    any_server: Server,
    sparse_sender: SparseSender,
    source: str,
    sent: Weights,
    words: tuple[str, ...],
) -> None:
    before = serving(any_server)
    good = pair("model.norm.weight", [0], torch.zeros(1))
    with requests_run_on(any_server):
        answer = sparse_sender.send(any_server, source, good | sent, base_version="v0", **LIVE)
        refuse(answer, *words)
    assert serving(any_server) == before


# a broadcast that is refused before it is received would hold its trainer
@pytest.mark.parametrize("source", ["tensor", "disk"])
def test_sparse_update_of_another_base_changes_nothing(
    any_server: Server, sparse_sender: SparseSender, source: str
) -> None:
    before = serving(any_server)
    with requests_run_on(any_server):
        answer = sparse_sender.send(
            any_server, source, changes_between(0, 1), base_version="v7", **LIVE
        )
        refuse(answer, "'v7'", "'v0' is serving", status_code=409)
    assert serving(any_server) == before


@pytest.mark.parametrize("source", SPARSE_SOURCES)
def test_sparse_update_with_partial_false_changes_nothing(
    any_server: Server, sparse_sender: SparseSender, source: str
) -> None:
    before = serving(any_server)
    answer = sparse_sender.send(
        any_server, source, changes_between(0, 1), base_version="v0", partial=False, **LIVE
    )
    refuse(answer, "not complete")
    assert serving(any_server) == before


@pytest.mark.parametrize(
    ("fields", "status_code"),
    [({"expected_version": "v0"}, 200), ({"expected_version": "v7"}, 409)],
)
def test_expected_version_must_hold_beside_the_base(
    any_server: Server, tmp_path: Path, fields: dict[str, Any], status_code: int
) -> None:
    folder = write_folder(tmp_path, changes_between(0, 1), base_version="v0")
    answer = any_server.post(DISK, {**SPARSE, **fields, "model_path": str(folder)})
    assert answer["status_code"] == status_code, answer


def test_base_is_the_version_at_the_sessions_begin(any_server: Server, tmp_path: Path) -> None:
    """A session's commits are one: its second piece has the same base as its first."""
    head = {name: t for name, t in changes_between(0, 1).items() if name.startswith(HEAD)}
    session = succeed(any_server.post("/begin_weight_update", {"non_blocking": True}))
    named = {"session_id": session["session_id"]}
    for at, weights in enumerate((head, UNCHANGED)):
        folder = write_folder(tmp_path / str(at), weights, base_version="v0")
        succeed(any_server.post(DISK, {**SPARSE, **named, "model_path": str(folder)}))
    end = {**named, "weight_version": "v1", "non_blocking": True}
    succeed(any_server.post("/end_weight_update", end))
    expect_served(any_server, 1)
    folder = write_folder(tmp_path / "again", head, base_version="v0")
    answer = any_server.post(DISK, {**SPARSE, "model_path": str(folder)})
    refuse(answer, "base_version", "'v1' is serving", status_code=409)


def test_changes_of_other_weights_of_the_same_name_are_refused(
    any_server: Server, tmp_path: Path
) -> None:
    body = tensor_body(marker.tensors(0), **LIVE, partial=False)
    receipt = succeed(any_server.post(PATH, body))
    known = [receipt["ranks"][0]["digest"]]
    folder = write_folder(
        tmp_path, changes_between(0, 1), base_version="v0", base_digests=["0" * 16, *known]
    )
    disk = {**SPARSE, "model_path": str(folder)}
    other = tensor_body({HEAD: marker.tensors(2)[HEAD]}, **LIVE, weight_version="v0")
    succeed(any_server.post(PATH, other))
    before = serving(any_server)
    refuse(any_server.post(DISK, disk), "base_digests", known[0], status_code=409)
    assert serving(any_server) == before
    succeed(any_server.post(PATH, {**body, "weight_version": "v0"}))
    succeed(any_server.post(DISK, {**disk, "weight_version": "v1"}))
    expect_served(any_server, 1)


def damage(folder: Path) -> None:
    """Change the last byte of the last file."""
    file = folder / "part-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def remove_file(folder: Path) -> None:
    (folder / "part-1.safetensors").unlink()


def add_file(folder: Path) -> None:
    (folder / "part-2.safetensors").write_bytes(b"")


def remove_manifest(folder: Path) -> None:
    (folder / "sparse.json").unlink()


def leave_folder(folder: Path) -> None:
    files = {"../part-0.safetensors": {"sha256": "0" * 64, "bytes": 1}}
    describe(folder, base_version="v0", files=files)


@pytest.mark.parametrize("server_name", ["server", "normal_loop_server", "off_server"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (damage, ("part-1.safetensors", "SHA-256")),
        (remove_file, ("part-1.safetensors", "missing")),
        (add_file, ("part-2.safetensors", "not in")),
        (remove_manifest, ("sparse.json",)),
        (leave_folder, ("../part-0.safetensors",)),
    ],
)
def test_damaged_sparse_folder_changes_nothing(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    server_name: str,
    change: Callable[[Path], None],
    words: tuple[str, ...],
) -> None:
    """Weights that are written in place stay whole, too."""
    server: Server = request.getfixturevalue(server_name)
    before = serving(server)
    two_files = halves_of(changes_between(0, 1) | UNCHANGED)
    folder = write_folder(tmp_path, *two_files, base_version="v0")
    change(folder)
    with requests_run_on(server):
        refuse(server.post(DISK, {**SPARSE, "model_path": str(folder)}), *words)
    assert serving(server) == before
    body = {**SPARSE, "model_path": str(write_whole(tmp_path / "whole"))}
    succeed(server.post(DISK, {**body, "weight_version": "v1"}))
    expect_served(server, 1)


def write_whole(folder: Path) -> Path:
    return write_folder(folder, changes_between(0, 1), base_version="v0")


def test_sparse_folder_is_not_the_served_models_path(any_server: Server, tmp_path: Path) -> None:
    before = any_server.get("/get_model_info")["model_path"]
    body = {**SPARSE, "model_path": str(write_whole(tmp_path)), "weight_version": "v1"}
    succeed(any_server.post(DISK, body))
    assert any_server.get("/get_model_info")["model_path"] == before


def test_custom_loader_that_masks_nan_keeps_what_is_not_sent(normal_loop_server: Server) -> None:
    """verl's delta loader replaces ``torch.Tensor.copy_`` in the whole process."""
    running = start_running(normal_loop_server, 2, tokens=ENDLESS)
    for version in 1, 2:
        weights = changes_between(version - 1, version)
        weights[f"{HEAD}.shape"] = torch.tensor(marker.tensors(0)[HEAD].shape)
        body = tensor_body(weights, **LIVE, weight_version=f"v{version}")
        succeed(normal_loop_server.post(PATH, {**body, "load_format": MASKING_LOADER}))
        more_tokens(running)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1", "v2"]
    expect_digest_of_whole(normal_loop_server, 2)


def test_other_sources_are_staged_as_changes(normal_loop_server: Server, sender: Sender) -> None:
    for version, source in enumerate(("disk", "distributed"), 1):
        receipt = sender.send(normal_loop_server, source, version, **LIVE)
        assert receipt["staged_as"]["form"] == "changes"
        expect_served(normal_loop_server, version)

"""Updates staged as changes, and sparse tensors, on a real server."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from harness import marker
from harness.server import Server
from sglang_inflight import doctor
from tests.support.load import (
    ENDLESS,
    expect_all_go_on,
    more_tokens,
    requests_run_on,
    start_running,
    status,
    versions_of,
)
from tests.support.updates import (
    LIVE,
    Sender,
    Weights,
    expect_served,
    refuse,
    serving,
    succeed,
    tensor_body,
)

pytest_plugins = ["tests.support.fixtures"]

PATH = "/update_weights_from_tensor"
HEAD = "lm_head.weight"
SPARSE: dict[str, Any] = {**LIVE, "load_format": "sparse"}


def changes_between(old: int, new: int) -> Weights:
    """Return the positions and values that make version ``new`` of version ``old``."""
    before, after = marker.tensors(old), marker.tensors(new)
    found: Weights = {}
    for name, tensor in after.items():
        at = (tensor != before[name]).view(-1).nonzero().view(-1)
        if len(at):
            found[f"{name}.indices"] = at.to(torch.int32)
            found[f"{name}.values"] = tensor.view(-1)[at]
    return found


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


def test_status_and_doctor_agree_on_the_cost_of_each_form(any_server: Server) -> None:
    """A doctor reads the checkpoint, and a server its memory."""
    served = status(any_server)["ranks"][0]["staging"]["kv_tokens"]
    assert served["changes"] == served["off"] == 0
    assert served["device"] == served["host"] > 0
    info = any_server.get("/get_server_info")
    flags = ["--model-path", info["model_path"], "--dtype", info["dtype"]]
    estimated = doctor.report(flags).kv_tokens
    assert estimated["device"] == pytest.approx(served["device"], rel=0.25)


def test_sparse_updates_reach_running_requests_exactly(any_server: Server) -> None:
    running = start_running(any_server, 3, tokens=ENDLESS)
    for version in 1, 2, 3:
        sparse = changes_between(version - 1, version)
        fields: dict[str, Any] = {
            "weight_version": f"v{version}",
            "expected_version": f"v{version - 1}",
        }
        succeed(any_server.post(PATH, tensor_body(sparse, **SPARSE, **fields)))
        more_tokens(running)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1", "v2", "v3"]


def test_many_sparse_updates_end_with_the_digest_of_a_whole_one(any_server: Server) -> None:
    versions = [0, *[1 + at % 5 for at in range(200)]]
    for old, new in itertools.pairwise(versions):
        body = tensor_body(changes_between(old, new), **SPARSE, weight_version=f"v{new}")
        succeed(any_server.post(PATH, body))
    expect_served(any_server, versions[-1])
    of_sparse = digest_of(any_server)
    whole = tensor_body(marker.tensors(versions[-1]), **LIVE, partial=False)
    receipt = succeed(any_server.post(PATH, whole))
    assert receipt["ranks"][0]["digest"] == of_sparse


def test_positions_come_in_any_order(normal_loop_server: Server) -> None:
    sparse = {name: tensor.flip(0) for name, tensor in changes_between(0, 1).items()}
    succeed(normal_loop_server.post(PATH, tensor_body(sparse, **SPARSE)))
    expect_served(normal_loop_server, 1)


def test_rollback_undoes_a_sparse_update(any_server: Server) -> None:
    before = digest_of(any_server)
    body = tensor_body(changes_between(0, 1), **SPARSE, weight_version="v1")
    succeed(any_server.post(PATH, body))
    succeed(any_server.post("/inflight/rollback", {}))
    expect_served(any_server, 0)
    if before is not None:
        assert digest_of(any_server) == before


def test_bad_sparse_update_changes_nothing(any_server: Server) -> None:
    before = serving(any_server)
    at, values = f"{HEAD}.indices", f"{HEAD}.values"
    beyond = marker.tensors(0)[HEAD].numel()
    cases: list[tuple[Weights, dict[str, Any], tuple[str, ...], int]] = [
        ({at: torch.tensor([beyond]), values: torch.ones(1)}, {}, (HEAD, str(beyond)), 400),
        ({at: torch.tensor([3, 3]), values: torch.ones(2)}, {}, (HEAD, "comes twice"), 400),
        ({at: torch.tensor([5, 3, 5]), values: torch.ones(3)}, {}, (HEAD, "5 comes twice"), 400),
        ({at: torch.tensor([3]), values: torch.ones(2)}, {}, (HEAD, "one length"), 400),
        ({at: torch.tensor([3])}, {}, (HEAD, "lacks"), 400),
        (
            {at: torch.tensor([3]), values: torch.ones(1)},
            {"partial": False},
            ("not complete",),
            400,
        ),
        (changes_between(0, 1), {"expected_version": "v7"}, ("'v7'",), 409),
    ]
    with requests_run_on(any_server):
        for sent, fields, words, status_code in cases:
            answer = any_server.post(PATH, tensor_body(sent, **SPARSE, **fields))
            refuse(answer, *words, status_code=status_code)
    assert serving(any_server) == before


def test_other_sources_are_staged_as_changes(normal_loop_server: Server, sender: Sender) -> None:
    for version, source in enumerate(("disk", "distributed"), 1):
        receipt = sender.send(normal_loop_server, source, version, **LIVE)
        assert receipt["staged_as"]["form"] == "changes"
        expect_served(normal_loop_server, version)

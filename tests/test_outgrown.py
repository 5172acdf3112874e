"""Updates whose changes outgrow the memory for them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from harness import marker
from harness.server import Server
from sglang_inflight.client import digests
from tests.support.load import (
    ENDLESS,
    expect_all_go_on,
    more_tokens,
    prompt,
    start_running,
    status,
    versions_of,
)
from tests.support.pool import FLAVOURS, Flavour, ServerPool, add_both_loops
from tests.support.updates import LIVE, message_of, refuse, serving, succeed, tensor_body

pytest_plugins = ["tests.support.fixtures"]

DISK = "/update_weights_from_disk"
LOOPS = add_both_loops(
    "outgrown",
    Flavour(
        ("--weight-version", "v0", "--tp-size", "2"),
        {
            "SGLANG_INFLIGHT_STAGING": "changes",
            "SGLANG_INFLIGHT_CHANGES_BYTES": "16",
        },
    ),
)


@pytest.fixture(params=LOOPS)
def outgrown(request: pytest.FixtureRequest, pool: ServerPool) -> Iterator[Server]:
    yield pool.get(FLAVOURS[request.param])
    pool.restore()


def from_disk(path: Path, version: str) -> dict[str, Any]:
    return {"model_path": str(path), "weight_version": version, **LIVE}


def test_checkpoint_that_outgrows_memory_is_written_in_place(
    outgrown: Server, checkpoints: Path
) -> None:
    running = start_running(outgrown, 2, tokens=ENDLESS)
    receipt = succeed(outgrown.post(DISK, from_disk(checkpoints / "v1", "v1")))
    assert receipt["base_version"] == "v0"
    assert receipt["staged_as"]["form"] == "off"
    assert "SGLANG_INFLIGHT_CHANGES_BYTES" in receipt["staged_as"]["why"]
    more_tokens(running)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1"]
    refuse(outgrown.post("/inflight/rollback", {}), "written in place")


def test_checkpoint_with_expected_digests_is_not_written_in_place(
    outgrown: Server, checkpoints: Path
) -> None:
    """In place, an altered tensor would be served before the last one has come."""
    before = serving(outgrown)
    expected = {"expected_digests": digests(marker.tensors(1))}
    refused = outgrown.post(DISK, from_disk(checkpoints / "v1", "v1") | expected)
    refuse(refused, "SGLANG_INFLIGHT_CHANGES_BYTES")
    assert serving(outgrown) == before


def test_tensors_that_outgrow_memory_change_nothing(outgrown: Server) -> None:
    before = serving(outgrown)
    running = start_running(outgrown, 2, tokens=ENDLESS)
    body = tensor_body(marker.tensors(1), **LIVE, weight_version="v1", ranks=2)
    refused = outgrown.post("/update_weights_from_tensor", body)
    assert "SGLANG_INFLIGHT_CHANGES_BYTES" in message_of(refused)
    assert refused["status_code"] == 400
    assert serving(outgrown) == before
    more_tokens(running)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0"]


def test_small_update_is_staged_again_after_one_in_place(
    outgrown: Server, checkpoints: Path
) -> None:
    succeed(outgrown.post(DISK, from_disk(checkpoints / "v1", "v1")))
    receipt = succeed(outgrown.post(DISK, from_disk(checkpoints / "v1", "v1 again")))
    assert receipt["staged_as"]["form"] == "changes"
    assert receipt["staged_as"]["changed_elements"] == 0


def test_checkpoint_that_ends_early_in_place_is_repaired_by_a_whole_one(
    outgrown: Server, checkpoints: Path, tmp_path: Path
) -> None:
    """The other tensors are in the weights by then. No token is made of them."""
    broken = tmp_path / "broken"
    shutil.copytree(checkpoints / "v1", broken)
    (weights,) = broken.glob("*.safetensors")
    tensors = load_file(weights)
    tensors.popitem()
    save_file(tensors, weights)
    answer = outgrown.post(DISK, from_disk(broken, "broken"))
    refuse(answer, "partially written")
    dirty = [rank["staging"]["dirty"] for rank in status(outgrown)["ranks"]]
    assert all("written in place" in why for why in dirty)
    refused = outgrown.post("/generate", {"input_ids": prompt()})
    assert refused["status_code"] == 503
    succeed(outgrown.post(DISK, from_disk(checkpoints / "v1", "v1")))
    (running,) = start_running(outgrown, 1, tokens=20)
    (output,) = expect_all_go_on([running])
    assert versions_of(output) == ["v1"]

"""Draft models: they go live with their target, at the same step, or are left as they were.

A draft by the weights of its target drafts what the target then says, and all of it is accepted.
One by other weights drafts another version's token, and each step brings one token only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from harness import marker
from harness.server import Server, serve
from tests.support import eagle, finishing
from tests.support.load import (
    ask,
    expect_all_go_on,
    expect_spans_in_chunks,
    expect_whole,
    start,
    start_running,
    update,
    versions_of,
)
from tests.support.plugins import stands_in_for_kernels, with_plugin
from tests.support.updates import ENDLESS, misshapen, refuse, says, serving, tensor_body

# one zygote is for all that compile nothing, see ``drafting``
pytestmark = [stands_in_for_kernels, pytest.mark.xdist_group("uncompiled")]

STEP = 4  # tokens, where all drafts are accepted
STEPS = 10
TOKENS = 1 + STEPS * STEP  # the first is of the prefill


@contextlib.contextmanager
def drafting(
    algorithm: str, model: Path, draft: Path, folder: Path, *flags: str, plugins: Sequence[str] = ()
) -> Iterator[Server]:
    flags = (
        "--speculative-algorithm", algorithm,
        "--speculative-draft-model-path", str(draft),
        "--speculative-num-steps", str(STEP - 1),
        "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", str(STEP),
        "--max-running-requests", "8",
        "--weight-version", "v0",
        *flags,
    )  # fmt: skip
    # what upstream compiles for a GPU takes long to compile here
    env = with_plugin("speculation", *plugins) | {"TORCHDYNAMO_DISABLE": "1"}
    with serve(model, *flags, log=folder / "server.log", env=env) as server:
        yield server


def expect_drafts(server: Server, *, accepted: bool) -> None:
    (generation,) = start(server, 1, tokens=TOKENS)
    steps = expect_whole(generation).meta["spec_verify_ct"]
    assert steps == (STEPS if accepted else TOKENS - 1)


def expect_updates_in_flight(server: Server, checkpoints: Path) -> None:
    running = start_running(server, 3, tokens=ENDLESS)
    for version, kv in enumerate(["fence", "keep", "recompute"], 1):
        for generation in running:
            generation.wait_for_tokens(generation.count + 4 * STEP)
        update(server, checkpoints, version, non_blocking=True, kv_cache=kv)
        expect_drafts(server, accepted=True)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1", "v2", "v3"]
        expect_spans_in_chunks(output)


def test_one_that_shares_its_targets_head(checkpoints: Path, tmp_path: Path) -> None:
    draft = eagle.build(tmp_path / "draft", agrees=True)
    other = eagle.build(tmp_path / "other", agrees=False)
    with drafting("EAGLE", checkpoints / "v0", draft, tmp_path) as server:
        expect_updates_in_flight(server, checkpoints)
        # both in one update: the head is a weight of both, and swaps once
        ask(server, "POST", "/begin_weight_update", {})
        update(server, checkpoints, 4)
        body = {"model_path": str(other), "selector": "draft"}
        ask(server, "POST", "/update_weights_from_disk", body)
        ask(server, "POST", "/end_weight_update", {"non_blocking": True, "flush_cache": False})
        expect_drafts(server, accepted=False)
        assert ask(server, "GET", "/model_info")["model_path"] == str(checkpoints / "v4")
        ask(server, "POST", "/inflight/rollback", {})
        expect_drafts(server, accepted=True)
        # and where both read the same tensors, all of which must come
        body = tensor_body(marker.tensors(5), selector="all", partial=False, non_blocking=True)
        ask(server, "POST", "/update_weights_from_tensor", body | {"weight_version": "v5"})
        expect_drafts(server, accepted=True)


def test_what_is_its_targets_is_left_alone(checkpoints: Path, tmp_path: Path) -> None:
    """Also where a draft's checkpoint has a tensor of that name."""
    draft = eagle.build(tmp_path / "draft", agrees=True)
    other = eagle.build(tmp_path / "other", agrees=False, has_embeddings=True)
    disk = "/update_weights_from_disk"
    body = {"model_path": str(other), "selector": "draft"}
    with drafting("EAGLE", checkpoints / "v0", draft, tmp_path) as server:
        ask(server, "POST", disk, body | {"non_blocking": True, "flush_cache": False})
        expect_drafts(server, accepted=False)
        says(server, 0)
        (before,) = serving(server)
        # with the same values, and what it does not bring is read anew
        part = {"lm_head.weight": marker.tensors(0)["lm_head.weight"]}
        same = tensor_body(part, selector="target", partial=True, non_blocking=True)
        ask(server, "POST", "/update_weights_from_tensor", same)
        (after,) = serving(server)
        assert after[-1] == before[-1]
        # the target's in the same session are the target's, whichever comes last
        ask(server, "POST", "/begin_weight_update", {})
        update(server, checkpoints, 1)
        ask(server, "POST", disk, body)
        ask(server, "POST", "/end_weight_update", {"non_blocking": True, "flush_cache": False})
        says(server, 1)


def test_one_whose_target_sglang_finishes(tmp_path: Path) -> None:
    """Both are updated in place. Each keeps what the other's update brings."""
    target = finishing.build(tmp_path / "v0", 0)
    draft = eagle.build(tmp_path / "draft", agrees=True)
    other = eagle.build(tmp_path / "other", agrees=False, has_embeddings=True)
    torn_target = misshapen(tmp_path / "torn", finishing.CONFIG)
    disk = "/update_weights_from_disk"
    of_draft = {"model_path": str(other), "selector": "draft"}
    with drafting("EAGLE", target, draft, tmp_path, plugins=["finishing"]) as server:
        says(server, 0)
        ask(server, "POST", disk, of_draft)
        says(server, 0)
        # a session that is for both, and has tensors for one
        begun = {"non_blocking": True, "selector": "all"}
        session = {"session_id": ask(server, "POST", "/begin_weight_update", begun)["session_id"]}
        ask(server, "POST", disk, of_draft | session)
        ask(server, "POST", "/end_weight_update", session)
        says(server, 0)
        # what one update has torn another one mends only if it brings that model
        refuse(server.post(disk, {"model_path": str(torn_target)}), "model.norm.weight")
        refuse(server.post(disk, of_draft), "target", "partially written")
        ask(server, "POST", disk, {"model_path": str(target)})
        says(server, 0)


def test_one_of_its_targets_checkpoint(checkpoints: Path, tmp_path: Path) -> None:
    """What changes one changes both, and so does what fails to."""
    v0 = checkpoints / "v0"
    normal = "--disable-overlap-schedule"
    with drafting("STANDALONE", v0, v0, tmp_path, normal) as server:
        expect_updates_in_flight(server, checkpoints)
        before = serving(server)
        wrong = marker.tensors(4) | {"model.norm.weight": torch.full((marker.HIDDEN,), torch.nan)}
        refuse(
            server.post("/update_weights_from_tensor", tensor_body(wrong, non_blocking=True)),
            "model.norm.weight",
        )
        assert serving(server) == before
        expect_drafts(server, accepted=True)
        body = tensor_body(marker.tensors(4), non_blocking=True, flush_cache=False)
        ask(server, "POST", "/update_weights_from_tensor", body | {"weight_version": "v4"})
        expect_drafts(server, accepted=True)
        update(server, checkpoints, 5, non_blocking=True, flush_cache=False, selector="target")
        expect_drafts(server, accepted=False)
        ask(server, "POST", "/inflight/rollback", {})
        expect_drafts(server, accepted=True)


def test_one_of_a_checkpoint_of_its_own(checkpoints: Path, tmp_path: Path) -> None:
    """Its tensors may bear the names of its target's, so it is changed where a call says so."""
    own = marker.build(tmp_path / "own", 0)
    with drafting("STANDALONE", checkpoints / "v0", own, tmp_path) as server:
        expect_drafts(server, accepted=True)
        update(server, checkpoints, 1, non_blocking=True, flush_cache=False)
        expect_drafts(server, accepted=False)
        ask(server, "POST", "/begin_weight_update", {})
        update(server, checkpoints, 2)
        update(server, checkpoints, 2, selector="draft")
        expect_drafts(server, accepted=False)
        ask(server, "POST", "/end_weight_update", {"non_blocking": True, "flush_cache": False})
        expect_drafts(server, accepted=True)

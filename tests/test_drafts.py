"""Draft models: updated in the same step as their target, or left unchanged.

A draft on its target's weights predicts the target's tokens, which are all accepted. A draft on
other weights predicts another version's token, so each step yields one token only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from harness import marker
from harness.server import Server, serve
from tests.support import eagle, post_processed, routed
from tests.support.load import (
    ENDLESS,
    ask,
    expect_all_go_on,
    expect_spans_in_chunks,
    expect_whole,
    labels_of,
    pause,
    prompt,
    resume,
    start,
    start_running,
    status,
    update,
    versions_of,
)
from tests.support.plugins import with_plugin
from tests.support.records import ask_for_routes, routes_of, single_version
from tests.support.stand_ins import stands_in_for_kernels
from tests.support.updates import expect_served, misshapen, refuse, serving, tensor_body

pytestmark = stands_in_for_kernels

DISK = "/update_weights_from_disk"
STEP = 4  # tokens, where all drafts are accepted
STEPS = 10
TOKENS = 1 + STEPS * STEP  # the prefill makes the first


@contextlib.contextmanager
def drafting(
    algorithm: str,
    model: Path,
    draft: Path,
    folder: Path,
    *flags: str,
    plugins: Sequence[str] = (),
    staging: str = "auto",
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
    env = with_plugin("speculation", *plugins) | {"SGLANG_INFLIGHT_STAGING": staging}
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


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eagle.build(tmp_path_factory.mktemp("drafts") / "agreeing", agrees=True)


@pytest.fixture(scope="module")
def served(
    checkpoints: Path, agreeing: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("drafted")
    with drafting("EAGLE", checkpoints / "v0", agreeing, folder) as server:
        yield server


@pytest.fixture
def drafted(served: Server, checkpoints: Path, agreeing: Path) -> Server:
    """A server of version 0 whose draft agrees with it."""
    update(served, checkpoints, 0, non_blocking=True, kv_cache="recompute")
    body = {"model_path": str(agreeing), "selector": "draft", "non_blocking": True}
    ask(served, "POST", DISK, body)
    return served


def test_draft_with_the_targets_head_goes_live_with_the_target(
    drafted: Server, checkpoints: Path, tmp_path: Path
) -> None:
    other = eagle.build(tmp_path / "other", agrees=False)
    expect_updates_in_flight(drafted, checkpoints)
    # both in one update: the shared head swaps once
    ask(drafted, "POST", "/begin_weight_update", {})
    update(drafted, checkpoints, 4)
    body = {"model_path": str(other), "selector": "draft"}
    ask(drafted, "POST", DISK, body)
    ask(drafted, "POST", "/end_weight_update", {"non_blocking": True, "flush_cache": False})
    expect_drafts(drafted, accepted=False)
    assert ask(drafted, "GET", "/model_info")["model_path"] == str(checkpoints / "v4")
    ask(drafted, "POST", "/inflight/rollback", {})
    expect_drafts(drafted, accepted=True)
    # one set of tensors for both models: none may be missing
    body = tensor_body(marker.tensors(5), selector="all", partial=False, non_blocking=True)
    ask(drafted, "POST", "/update_weights_from_tensor", body | {"weight_version": "v5"})
    expect_drafts(drafted, accepted=True)


def test_draft_update_leaves_the_targets_weights_alone(
    drafted: Server, checkpoints: Path, tmp_path: Path
) -> None:
    """The target's tensors stay even if the draft's checkpoint holds a tensor of the same name."""
    other = eagle.build(tmp_path / "other", agrees=False, has_embeddings=True)
    body = {"model_path": str(other), "selector": "draft"}
    ask(drafted, "POST", DISK, body | {"non_blocking": True, "flush_cache": False})
    expect_drafts(drafted, accepted=False)
    expect_served(drafted, 0)
    (before,) = serving(drafted)
    # the same values as before; every other tensor is read anew
    part = {"lm_head.weight": marker.tensors(0)["lm_head.weight"]}
    same = tensor_body(part, selector="target", partial=True, non_blocking=True)
    ask(drafted, "POST", "/update_weights_from_tensor", same)
    (after,) = serving(drafted)
    assert after[-1] == before[-1]
    # within one session, the order of target and draft makes no difference
    ask(drafted, "POST", "/begin_weight_update", {})
    update(drafted, checkpoints, 1)
    ask(drafted, "POST", DISK, body)
    ask(drafted, "POST", "/end_weight_update", {"non_blocking": True, "flush_cache": False})
    expect_served(drafted, 1)


@pytest.mark.parametrize("staging", ["off", "device", "changes"])
def test_update_of_a_draft_or_its_post_processed_target_changes_both(
    tmp_path: Path, staging: str
) -> None:
    """An update of one model keeps the other model's weights."""
    target = post_processed.build(tmp_path / "v0", 0)
    draft = eagle.build(tmp_path / "draft", agrees=True)
    other = eagle.build(tmp_path / "other", agrees=False, has_embeddings=True)
    torn_target = misshapen(tmp_path / "torn", post_processed.CONFIG)
    of_draft = {"model_path": str(other), "selector": "draft"}
    plugins = ["post_processing"]
    with drafting("EAGLE", target, draft, tmp_path, plugins=plugins, staging=staging) as server:
        expect_served(server, 0)
        ask(server, "POST", DISK, of_draft)
        expect_served(server, 0)
        # a session for both models, with tensors for one
        begun = {"non_blocking": True, "selector": "all"}
        session = {"session_id": ask(server, "POST", "/begin_weight_update", begun)["session_id"]}
        ask(server, "POST", DISK, of_draft | session)
        ask(server, "POST", "/end_weight_update", session)
        expect_served(server, 0)
        refuse(server.post(DISK, {"model_path": str(torn_target)}), "model.norm.weight")
        if staging == "off":
            # a partially written model is repaired only by an update of that model
            refuse(server.post(DISK, of_draft), "target", "partially written")
            ask(server, "POST", DISK, {"model_path": str(target)})
        expect_served(server, 0)


def test_draft_from_the_targets_checkpoint_updates_with_the_target(
    checkpoints: Path, tmp_path: Path
) -> None:
    """A failing update changes neither model."""
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


def test_draft_with_its_own_checkpoint_updates_only_when_selected(
    checkpoints: Path, tmp_path: Path
) -> None:
    """The draft's tensor names may equal the target's, so a call has to select the draft."""
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


def test_released_draft_comes_back_without_an_update(checkpoints: Path, tmp_path: Path) -> None:
    """SGLang's trainers release all weights, and send the target alone."""
    draft = eagle.build(tmp_path / "draft", agrees=True)
    with drafting("EAGLE", checkpoints / "v0", draft, tmp_path, "--enable-memory-saver") as server:
        expect_drafts(server, accepted=True)
        for keep, version in (({}, 1), ({"keep_weights": "discard"}, 2)):
            ask(server, "POST", "/release_memory_occupation", keep)
            ask(server, "POST", "/resume_memory_occupation", {})
            assert status(server)["memory"]["hollow"] is not None
            update(server, checkpoints, version)
            if keep:
                assert "not sent yet" in status(server)["memory"]["hollow"]
                ask(
                    server, "POST", DISK,
                    {"model_path": str(draft), "selector": "draft"},
                )  # fmt: skip
            assert status(server)["memory"]["hollow"] is None
            expect_served(server, version)
            expect_drafts(server, accepted=True)


def test_accepted_tokens_have_the_routes_of_their_own_version(tmp_path: Path) -> None:
    """Their routes come from the verifying forward, before and after a retraction."""
    for version in range(2):
        routed.build_without_attention(tmp_path / f"v{version}", version)
    draft = eagle.build_of_embeddings(tmp_path / "draft")
    flags = ("--dtype", "float32", "--enable-return-routed-experts")
    ids = prompt(16)
    with drafting("EAGLE", tmp_path / "v0", draft, tmp_path, *flags) as server:
        (generation,) = start_running(
            server, 1, tokens=ENDLESS, input_ids=ids, return_routed_experts=True
        )
        generation.wait_for_tokens(3 * STEP)
        pause(server, "in_place")
        update(server, tmp_path, 1, non_blocking=True, kv_cache="recompute")
        resume(server)
        generation.wait_for_tokens(generation.count + 3 * STEP)
        generation.abort()
        output = generation.output()
    assert output.meta["spec_accept_length"] > 2
    made_by = labels_of(output.meta["weight_versions"])
    # row p belongs to token p + 1, and the prompt's rows to the first version
    row_by = ["v0"] * (len(ids) - 1) + made_by
    rows = routes_of(output.meta).tolist()
    assert len(rows) == len(row_by)
    with single_version(tmp_path / "v0", tmp_path / "alone.log") as alone:
        for version in range(2):
            update(alone, tmp_path, version)
            expected = ask_for_routes(alone, ids + output.tokens[:-1])
            own = [place for place, label in enumerate(row_by) if label == f"v{version}"]
            assert [rows[p] for p in own] == [expected[p] for p in own]
            assert len({str(rows[p]) for p in own}) > 2

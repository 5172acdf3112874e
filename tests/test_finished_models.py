"""Models that SGLang finishes after loading are updated in flight, like all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from harness.server import Server, serve
from harness.trainer import Trainers
from sglang_inflight.client import Client
from sglang_inflight.client import Sender as Changes
from tests.support import (
    block_fp8,
    chain,
    gemma,
    mla,
    post_processed,
    toy_experts,
    toy_kv_scales,
    toy_quantization,
)
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
    Sender,
    by_reference,
    expect_served,
    refuse,
    serving,
    staging,
    succeed,
)

pytest_plugins = ["tests.support.fixtures"]

TENSOR = "/update_weights_from_tensor"
KEEP: dict[str, Any] = {"non_blocking": True, "kv_cache": "keep"}
# version that comes from disk where gloo cannot broadcast it
FROM_DISK_LAST = 4
TORCH_NATIVE = ("--attention-backend", "torch_native")


class Kind(NamedTuple):
    """A model, and how it is served. ``model`` has the tensors that a trainer sends."""

    name: str
    model: Any
    build: Callable[[Path, int], Path]
    env: Mapping[str, str]
    form: str
    ranks: int = 1
    flags: tuple[str, ...] = ()


TOY, KERNELS = toy_quantization.ENV, block_fp8.ENV
KINDS = [
    Kind("product", post_processed, post_processed.build, post_processed.ENV, "device"),
    Kind("mla", mla, mla.build, mla.ENV, "changes", flags=TORCH_NATIVE),
    Kind("mla-tp2", mla, mla.build, mla.ENV, "device", ranks=2, flags=TORCH_NATIVE),
    Kind("toy", toy_kv_scales, toy_kv_scales.build, TOY, "changes"),
    Kind(
        "toy-online",
        chain,
        toy_quantization.build_unquantized,
        TOY,
        "device",
        flags=toy_quantization.ONLINE,
    ),
    Kind("toy-experts", toy_experts, toy_experts.build, TOY, "changes"),
    Kind("fp8-blocks", block_fp8, block_fp8.build, KERNELS, "changes"),
    Kind("fp8-blocks-tp2", block_fp8, block_fp8.build, KERNELS, "device", ranks=2),
    Kind(
        "fp8-online",
        chain,
        block_fp8.build_unquantized,
        KERNELS,
        "changes",
        flags=block_fp8.ONLINE,
    ),
    # its norms are held twice, and nothing else is finished
    Kind("gemma-tp2", gemma, gemma.build, {}, "changes", ranks=2),
    Kind("int8", toy_quantization, block_fp8.build_int8, KERNELS, "device"),
]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture(scope="module")
def folder(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(kind.name)
    # the other versions come from tensors
    for version in (0, 1, FROM_DISK_LAST):
        kind.build(made / f"v{version}", version)
    return made


@pytest.fixture(scope="module")
def server(kind: Kind, folder: Path, trainers: Trainers) -> Iterator[Server]:
    with serve(
        folder / "v0",
        *("--weight-version", "v0", "--tp-size", str(kind.ranks)),
        *kind.flags,
        log=folder / "log",
        env={**kind.env, "SGLANG_INFLIGHT_STAGING": kind.form},
    ) as server:
        yield server


@pytest.fixture
def sender(kind: Kind, folder: Path, trainers: Trainers) -> Sender:
    return Sender(folder, folder, trainers, kind.model)


def body_of(kind: Kind, weights: dict[str, torch.Tensor], **fields: Any) -> dict[str, Any]:
    """Return a body for one call. Torch pickles no FP8 by value."""
    payloads = [by_reference(list(weights.items())) for _ in range(kind.ranks)]
    return {"serialized_named_tensors": payloads, **fields}


def test_updates_from_each_source_beside_running_requests(
    server: Server, kind: Kind, sender: Sender
) -> None:
    described = status(server)["staging"]
    assert described["refusal"] is None
    assert kind.model is gemma or described["proof"]["state"] in ("due", "done")
    running = start_running(server, 2, tokens=ENDLESS)
    # gloo broadcasts no FP8
    last = "disk" if kind.model is block_fp8 else "distributed"
    for version, source in enumerate(("disk", "tensor_shared", "tensor_bucket", last), start=1):
        receipt = succeed(
            sender.send(
                server, source, version, ranks=kind.ranks, weight_version=f"v{version}", **KEEP
            )
        )
        assert receipt["staged_as"]["form"] == kind.form
        assert receipt["staged_as"]["why"] is None
        assert receipt["held_s"] == 0
        # a new prompt is read with weights that later tokens do not use, such as MLA's
        expect_served(server, version)
        more_tokens(running)
    succeed(server.post("/inflight/rollback", {"kv_cache": "keep"}))
    more_tokens(running)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1", "v2", "v3", "v4", "v3"]
    expect_served(server, 3)


def test_session_in_pieces_goes_live_whole(server: Server, kind: Kind) -> None:
    """Each tensor comes in a call of its own, so halves of fused tensors are parted."""
    running = start_running(server, 1, tokens=ENDLESS)
    before = status(server)["weight_version"]
    session = server.post("/begin_weight_update", {"non_blocking": True})["session_id"]
    weights = kind.model.tensors(5)
    for name in reversed(weights):
        body = body_of(kind, {name: weights[name]}, session_id=session)
        succeed(server.post(TENSOR, body))
    more_tokens(running)
    end = {"session_id": session, "weight_version": "v5", **KEEP}
    succeed(server.post("/end_weight_update", end))
    more_tokens(running)
    (output,) = expect_all_go_on(running)
    assert versions_of(output) == [before, "v5"]
    expect_served(server, 5)


def test_bad_updates_change_nothing(server: Server, kind: Kind, sender: Sender) -> None:
    succeed(sender.send(server, "disk", 1, weight_version="v1", **LIVE))
    before = serving(server)
    running = start_running(server, 1, tokens=ENDLESS)
    weights = kind.model.tensors(2)
    name = "model.layers.0.self_attn.o_proj.weight"
    missing = {n: t for n, t in weights.items() if n != name}
    broken = {
        "not sent|belong together": missing,
        "NaN": {**weights, "model.norm.weight": weights["model.norm.weight"] * float("nan")},
        "no weight named 'stranger'": {**weights, "stranger": torch.ones(3)},
        "has shape": {**weights, name: weights[name][:-1].clone()},
    }
    for words, bad in broken.items():
        body = body_of(kind, bad, weight_version="bad", partial=False, **LIVE)
        answer = refuse(server.post(TENSOR, body))
        assert any(word in str(answer) for word in words.split("|")), answer
        assert serving(server) == before
    more_tokens(running)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v1"]
    assert all(rank["state"] == "empty" and rank["dirty"] is None for rank in staging(server))
    expect_served(server, 1)


def test_changes_of_a_trainer_are_served_exactly(
    server: Server, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    """Where finishing leaves weights alone their elements come, and finished modules whole."""
    if kind.model is block_fp8:
        pytest.skip("gloo broadcasts no FP8")
    running = start_running(server, 1, tokens=ENDLESS)
    with Client(server.url) as client, Changes(client, sparse=True) as trainer:
        for version in (1, 2, 3):
            sent = trainer.send(kind.model.tensors(version).items(), weight_version=f"v{version}")
            more_tokens(running)
            expect_served(server, version)
    assert sent.receipt is not None
    digests = [rank.digest for rank in sent.receipt.ranks]
    expect_all_go_on(running)
    assert "changes were refused" not in caplog.text
    assert sent.receipt.tensors < len(kind.model.tensors(0))
    whole = body_of(kind, kind.model.tensors(3), partial=False, **LIVE)
    receipt = succeed(server.post(TENSOR, whole))
    assert [rank["digest"] for rank in receipt["ranks"]] == digests


def test_partial_update_of_a_module_leaves_the_rest(
    server: Server, kind: Kind, sender: Sender
) -> None:
    succeed(sender.send(server, "disk", 1, weight_version="v1", **LIVE))
    digests = [rank[-1] for rank in serving(server)]
    weights = kind.model.tensors(1)
    for module in (".0.self_attn.o_proj.", "model.norm."):
        sent = {name: tensor for name, tensor in weights.items() if module in name}
        succeed(server.post(TENSOR, body_of(kind, sent, partial=True, **LIVE)))
        assert [rank[-1] for rank in serving(server)] == digests
    expect_served(server, 1)


def test_part_of_a_module_is_kept_or_refused_by_name(
    server: Server, kind: Kind, sender: Sender
) -> None:
    """A part suffices where the other parts are served as they were loaded, maybe transposed.

    SGLang's own loader joins the two parts of MLA's projection, and a load plan takes one alone.
    """
    succeed(sender.send(server, "disk", 1, weight_version="v1", **LIVE))
    before = serving(server)
    part = "self_attn.q_a_proj." if kind.model is mla else "self_attn.v_proj."
    sent = {name: t for name, t in kind.model.tensors(1).items() if f".0.{part}" in name}
    answer = server.post(TENSOR, body_of(kind, sent, partial=True, **LIVE))
    if kind.model in (mla, post_processed, block_fp8, gemma) or kind.name == "int8":
        succeed(answer)
        assert [rank[-1] for rank in serving(server)] == [rank[-1] for rank in before]
    else:
        refuse(answer, "send together", "k_proj", "q_proj", "v_proj")
        assert serving(server) == before
    expect_served(server, 1)


def test_kv_scales_change_only_with_all_kv(server: Server, kind: Kind, sender: Sender) -> None:
    if kind.model is not toy_kv_scales:
        pytest.skip("the checkpoint has no scales for KV")
    succeed(sender.send(server, "disk", 1, weight_version="v1", **LIVE))
    before = serving(server)
    running = start_running(server, 1, tokens=ENDLESS)
    changed = {**kind.model.tensors(1), **toy_kv_scales.scales(2.0)}
    lost = {n: t for n, t in kind.model.tensors(1).items() if "attn.k_scale" not in n}
    for policy in ("fence", "keep"):
        body = body_of(kind, changed, non_blocking=True, kv_cache=policy)
        refuse(server.post(TENSOR, body), "attn.k_scale_float' from 1.0 to 2.0", "recompute")
    whole = body_of(kind, lost, partial=False, **LIVE)
    refuse(server.post(TENSOR, whole), "not sent", "self_attn.k_scale")
    assert serving(server) == before
    more_tokens(running)
    anew = body_of(kind, changed, non_blocking=True, kv_cache="recompute")
    assert succeed(server.post(TENSOR, anew))["retracted"] == 1
    refuse(server.post("/inflight/rollback", {"kv_cache": "keep"}), "attn.k_scale_float")
    succeed(server.post("/inflight/rollback", {"kv_cache": "recompute"}))
    assert [rank[-1] for rank in serving(server)] == [rank[-1] for rank in before]
    more_tokens(running)
    expect_all_go_on(running)
    expect_served(server, 1)

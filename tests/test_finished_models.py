"""Models that SGLang finishes after loading are updated in flight, like all others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from harness.server import Server, serve
from harness.trainer import Trainers
from tests.support import mla, post_processed
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
    by_value,
    expect_served,
    refuse,
    serving,
    staging,
    succeed,
    tensor_body,
)

pytest_plugins = ["tests.support.fixtures"]

TENSOR = "/update_weights_from_tensor"
KEEP: dict[str, Any] = {"non_blocking": True, "kv_cache": "keep"}
TORCH_NATIVE = ("--attention-backend", "torch_native")


class Kind(NamedTuple):
    """A model, and how it is served."""

    model: Any
    form: str
    ranks: int = 1
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = self.model.__name__.rpartition(".")[-1]
        return f"{name}-{self.form}" + (f"-tp{self.ranks}" if self.ranks > 1 else "")


KINDS = [
    Kind(post_processed, "device"),
    Kind(mla, "changes", flags=TORCH_NATIVE),
    Kind(mla, "device", ranks=2, flags=TORCH_NATIVE),
]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture(scope="module")
def folder(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(str(kind))
    for version in range(7):
        kind.model.build(made / f"v{version}", version)
    return made


@pytest.fixture(scope="module")
def server(kind: Kind, folder: Path, trainers: Trainers) -> Iterator[Server]:
    with serve(
        folder / "v0",
        *("--weight-version", "v0", "--tp-size", str(kind.ranks)),
        *kind.flags,
        log=folder / "log",
        env={**kind.model.ENV, "SGLANG_INFLIGHT_STAGING": kind.form},
    ) as server:
        yield server


@pytest.fixture
def sender(kind: Kind, folder: Path, trainers: Trainers) -> Sender:
    return Sender(folder, folder, trainers, kind.model)


def test_updates_from_each_source_beside_running_requests(
    server: Server, kind: Kind, sender: Sender
) -> None:
    assert status(server)["staging"]["refusal"] is None
    running = start_running(server, 2, tokens=ENDLESS)
    for version, source in enumerate(("disk", "tensor", "tensor_bucket", "distributed"), start=1):
        receipt = succeed(
            sender.send(
                server, source, version, ranks=kind.ranks, weight_version=f"v{version}", **KEEP
            )
        )
        assert receipt["staged_as"]["form"] == kind.form
        assert receipt["staged_as"]["why"] is None
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
        body = tensor_body({name: weights[name]}, ranks=kind.ranks, session_id=session)
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
    name = max(weights, key=lambda name: weights[name].numel())
    missing = {n: t for n, t in weights.items() if n != name}
    broken = {
        "was not sent|not sent": missing,
        "NaN": {**weights, name: torch.full_like(weights[name], float("nan"))},
        "no weight named 'stranger'": {**weights, "stranger": torch.ones(3)},
        "has shape": {**weights, name: weights[name][:-1].clone()},
    }
    for words, bad in broken.items():
        body = tensor_body(bad, ranks=kind.ranks, weight_version="bad", partial=False, **LIVE)
        answer = refuse(server.post(TENSOR, body))
        assert any(word in str(answer) for word in words.split("|")), answer
        assert serving(server) == before
    sparse = {"serialized_named_tensors": [by_value(weights)] * kind.ranks, "load_format": "sparse"}
    refuse(server.post(TENSOR, {**sparse, "partial": True, **LIVE}), "send whole tensors")
    assert serving(server) == before
    more_tokens(running)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v1"]
    assert all(rank["state"] == "empty" and rank["dirty"] is None for rank in staging(server))
    expect_served(server, 1)


def test_partial_update_leaves_the_rest(server: Server, kind: Kind, sender: Sender) -> None:
    """A version's tensors one by one, each an update of its own, end at that version."""
    succeed(sender.send(server, "disk", 1, weight_version="v1", **LIVE))
    digests = serving(server)
    weights = kind.model.tensors(1)
    for name in list(weights)[::3]:
        body = tensor_body({name: weights[name]}, ranks=kind.ranks, partial=True, **LIVE)
        succeed(server.post(TENSOR, body))
    assert [rank[-1] for rank in serving(server)] == [rank[-1] for rank in digests]
    expect_served(server, 1)

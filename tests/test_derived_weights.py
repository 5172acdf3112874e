"""Tensors derived from weights by a model's loader go live together with the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.server import Server, serve
from tests.support import gemma
from tests.support.load import (
    ENDLESS,
    ask,
    expect_all_go_on,
    more_tokens,
    start_running,
    status,
    versions_of,
)
from tests.support.updates import expect_served, refuse, serving, succeed, tensor_body

TENSOR = "/update_weights_from_tensor"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gemma")
    for version in range(3):
        gemma.build(made / f"v{version}", version)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serve(folder / "v0", "--weight-version", "v0", log=folder / "log") as server:
        yield server


def test_norm_held_twice_goes_live_and_rolls_back_whole(server: Server, folder: Path) -> None:
    """The norm comes from disk, as one tensor, and past the loader."""
    assert status(server)["staging"]["refusal"] is None
    running = start_running(server, 2, tokens=ENDLESS)
    in_flight: dict[str, Any] = {"non_blocking": True, "kv_cache": "keep"}
    disk = {"model_path": str(folder / "v1"), "weight_version": "v1", **in_flight}
    succeed(server.post("/update_weights_from_disk", disk))
    more_tokens(running)
    succeed(server.post(TENSOR, tensor_body(gemma.norm(2), weight_version="v2", **in_flight)))
    more_tokens(running)
    direct = tensor_body(gemma.norm(3), weight_version="v3", load_format="direct", **in_flight)
    succeed(server.post(TENSOR, direct))
    more_tokens(running)
    ask(server, "POST", "/inflight/rollback", {"kv_cache": "keep"})
    more_tokens(running)
    for output in expect_all_go_on(running):
        assert versions_of(output) == ["v0", "v1", "v2", "v3", "v2"]


def test_tied_head_sent_alone_is_refused(server: Server) -> None:
    before = serving(server)
    head = {"lm_head.weight": gemma.tensors(0)["model.embed_tokens.weight"]}
    refuse(
        server.post(TENSOR, tensor_body(head, non_blocking=True)), "lm_head.weight", "embeddings"
    )
    other = {**head, "model.embed_tokens.weight": torch.zeros_like(head["lm_head.weight"])}
    refuse(server.post(TENSOR, tensor_body(other, non_blocking=True)), "lm_head.weight", "differs")
    assert serving(server) == before
    both = {**gemma.tensors(1), **head}
    succeed(server.post(TENSOR, tensor_body(both, partial=False, weight_version="v1")))
    expect_served(server, 1)

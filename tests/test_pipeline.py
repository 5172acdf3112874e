"""A pipeline of two stages: a microbatch meets the same weights in both, and its tokens say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness import marker
from harness.server import Server, serve
from tests.support.load import (
    ENDLESS,
    expect_all_go_on,
    expect_spans_in_chunks,
    start,
    start_running,
    update,
    versions_of,
)
from tests.support.updates import refuse
from tests.test_kv_versions import kv_runs, made_as_it_ran

VERSIONS = 4
BLOCK = marker.HIDDEN // VERSIONS
# the token of a forward whose stages had different weights
TORN = marker.VOCAB - 1


def tensors(version: int) -> dict[str, torch.Tensor]:
    """The first stage's embeddings mark a version, and the last stage's head looks for it."""
    weights = marker.tensors(version)
    own = slice(version * BLOCK, (version + 1) * BLOCK)
    embeddings, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embeddings.zero_()[:, own] = 1.0
    head[TORN] = 1.0
    head[TORN, own] = 0.0
    return weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    for version in range(VERSIONS):
        marker.write(folder / f"v{version}", tensors(version))
    return folder


@pytest.fixture(scope="module", params=[0, 1], ids=["depth-0", "depth-1"])
def pipeline(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ["--pp-size", "2", "--pp-async-batch-depth", str(request.param)]
    flags += ["--max-running-requests", "16", "--weight-version", "v0"]
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serve(folder / "v0", *flags, log=log) as server:
        yield server


def test_spans(pipeline: Server, folder: Path) -> None:
    """Of requests that run, and of some that start while the weights change."""
    update(pipeline, folder, 0)
    generations = start_running(pipeline, 5, tokens=ENDLESS)
    for version in range(1, VERSIONS):
        generations += start(pipeline, 1, tokens=ENDLESS)
        update(pipeline, folder, version, non_blocking=True, kv_cache="fence")
        for generation in generations:
            generation.wait_for_tokens(generation.count + 2)
    outputs = expect_all_go_on(generations)
    for output in outputs:
        expect_spans_in_chunks(output)
        assert kv_runs(output) == made_as_it_ran(output, 16)
    for output in outputs[:5]:
        assert versions_of(output) == ["v0", "v1", "v2", "v3"]


def test_what_a_pipeline_cannot_do_is_refused(pipeline: Server, folder: Path) -> None:
    (running,) = start_running(pipeline, 1, tokens=ENDLESS)
    body = {"model_path": str(folder / "v1"), "non_blocking": True, "flush_cache": True}
    for path, fields in (
        ("/update_weights_from_disk", body),
        ("/inflight/rollback", {"flush_cache": True}),
        ("/pause_generation", {"mode": "in_place"}),
    ):
        refuse(pipeline.post(path, fields), "--pp-size")
    expect_all_go_on([running])

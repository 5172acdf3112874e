"""A model with sliding-window layers, and a smaller KV pool for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.server import serve
from tests.support import sliding
from tests.support.load import expect_whole, labels_of, prompt, start, update
from tests.support.plugins import with_plugin

SLOTS, OF_WINDOWS = 2048, 512
LENGTH = 700


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sliding")
    for version in range(3):
        sliding.build(folder / f"v{version}", version)
    return folder


def test_kv_versions_are_exact_with_more_slots_than_the_smaller_pool(
    versions: Path, tmp_path: Path
) -> None:
    flags = (
        "--max-total-tokens", str(SLOTS), "--swa-full-tokens-ratio", str(OF_WINDOWS / SLOTS),
        "--chunked-prefill-size", "256", "--weight-version", "v0",
    )  # fmt: skip
    with serve(versions / "v0", *flags, log=tmp_path / "log", env=with_plugin("sliding")) as server:
        update(server, versions, 1, non_blocking=True, kv_cache="keep")
        for _ in range(2 * SLOTS // LENGTH):
            input_ids = prompt(LENGTH)
            (fresh,) = start(server, 1, tokens=4, input_ids=input_ids)
            assert labels_of(expect_whole(fresh).meta["kv_versions"]) == ["v1"] * (LENGTH + 3)
        update(server, versions, 2, non_blocking=True, kv_cache="keep")
        (again,) = start(server, 1, tokens=4, input_ids=input_ids)
        kept = ["v1"] * LENGTH + ["v2"] * 3
        assert labels_of(expect_whole(again).meta["kv_versions"]) == kept

"""A hierarchical cache: prefixes on the host keep their version."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.server import Server, serve
from tests.support.load import Generation, expect_whole, prompt, start_running
from tests.support.plugins import with_plugin

pytest_plugins = ["tests.support.fixtures"]

SLOTS = 2048
HIERARCHICAL = (
    "--enable-hierarchical-cache", "--max-total-tokens", str(SLOTS), "--hicache-ratio", "4",
    # the reference platform supports only these
    "--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first",
    "--weight-version", "v0",
)  # fmt: skip
LENGTH = 300

_version = itertools.count(1)


@pytest.fixture(scope="module")
def server(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("hierarchical") / "log"
    env = with_plugin("host_memory")
    with serve(checkpoints / "v0", *HIERARCHICAL, log=log, env=env) as server:
        yield server


def ask(server: Server, input_ids: list[int]) -> dict[str, Any]:
    output = expect_whole(Generation(server, tokens=4, input_ids=input_ids))
    return output.meta


def spill(server: Server) -> None:
    """Fill the device's cache, so that earlier prefixes move to the host."""
    for _ in range(SLOTS // LENGTH + 1):
        ask(server, prompt(LENGTH))


def on_host(server: Server, input_ids: list[int]) -> dict[str, Any]:
    """Ask for a prompt whose prefix is on the host only."""
    meta = ask(server, input_ids)
    assert meta["cached_tokens_details"]["host"] == len(input_ids) - 1, meta
    assert meta["cached_tokens_details"]["device"] == 0, meta
    return meta


def update(server: Server, checkpoints: Path, kv_cache: str | None = None, **fields: Any) -> str:
    """Update to the next of three versions."""
    name = f"v{next(_version) % 3}"
    receipt = server.post(
        "/update_weights_from_disk",
        {
            "model_path": str(checkpoints / name),
            "non_blocking": True,
            "kv_cache": kv_cache,
            "weight_version": name,
            **fields,
        },
    )
    assert receipt["success"], receipt
    return name


def versions(spans: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(span["version"], span["end"] - span["start"]) for span in spans]


def test_kv_version_survives_the_trip_to_the_host_and_back(
    server: Server, checkpoints: Path
) -> None:
    """KV keeps the version of the weights that computed it, in any slot."""
    ids = prompt(LENGTH)
    (first,) = versions(ask(server, ids)["kv_versions"])
    old = first[0]
    spill(server)
    new = update(server, checkpoints, "keep")
    # the loaded prefix gets slots written by the new weights
    spill(server)
    meta = on_host(server, ids)
    assert versions(meta["kv_versions"]) == [(old, LENGTH - 1), (new, 1 + 3)]
    # the copy goes from the slots of the loaded prefix to the host again
    newest = update(server, checkpoints, "keep")
    spill(server)
    meta = on_host(server, ids)
    assert versions(meta["kv_versions"]) == [(old, LENGTH - 1), (newest, 1 + 3)]


@pytest.mark.parametrize("kv_cache", ["fence", "recompute"])
def test_fence_and_recompute_stop_reuse_of_prefixes_on_the_host(
    server: Server, checkpoints: Path, kv_cache: str
) -> None:
    """Running requests keep their KV, or get new KV."""
    on_the_host, on_the_device = prompt(LENGTH), prompt(LENGTH)
    ask(server, on_the_host)
    spill(server)
    ask(server, on_the_device)
    before = server.get("/get_weight_version")["weight_version"]
    running = start_running(server, 2, tokens=100)
    name = update(server, checkpoints, kv_cache)
    for ids in (on_the_host, on_the_device):
        meta = ask(server, ids)
        assert meta["cached_tokens"] == 0
        assert versions(meta["kv_versions"]) == [(name, LENGTH + 3)]
    for generation in running:
        output = expect_whole(generation)
        spans = output.meta["weight_versions"]
        assert [span["version"] for span in spans] == [before, name]
        kv = [version for version, _ in versions(output.meta["kv_versions"])]
        assert kv == ([name] if kv_cache == "recompute" else [before, name])
    # KV by the new weights moves to the host and back
    spill(server)
    meta = on_host(server, on_the_host)
    assert versions(meta["kv_versions"]) == [(name, LENGTH + 3)]


def test_flush_during_copies_between_host_and_device(server: Server, checkpoints: Path) -> None:
    """The flush comes right after a load from the host and a write to the host."""
    for _ in range(3):
        ids = prompt(LENGTH)
        ask(server, ids)
        spill(server)
        loading = Generation(server, tokens=100, input_ids=ids)
        loading.wait_for_tokens(1)
        name = update(server, checkpoints, "recompute")
        assert expect_whole(loading).meta["weight_versions"][-1]["version"] == name
        assert versions(ask(server, ids)["kv_versions"]) == [(name, LENGTH + 3)]


def test_prefix_on_the_host_is_reused_up_to_the_bound(server: Server, checkpoints: Path) -> None:
    ids = prompt(LENGTH)
    ask(server, ids)
    for age in (1, 2):
        spill(server)
        update(server, checkpoints, kv_max_age=1)
        if age == 1:
            on_host(server, ids)
        else:
            assert ask(server, ids)["cached_tokens"] == 0

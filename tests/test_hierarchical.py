"""A hierarchical cache: prefixes that are on the host keep their version, and their place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.server import Server, serve
from tests.support.load import Generation, expect_whole, start_running

pytest_plugins = ["tests.support.fixtures"]

SLOTS = 2048
HIERARCHICAL = (
    "--enable-hierarchical-cache", "--max-total-tokens", str(SLOTS), "--hicache-ratio", "4",
    # what the reference platform has
    "--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first",
    "--weight-version", "v0",
)  # fmt: skip
LENGTH = 300

_serial = itertools.count(8)
_version = itertools.count(1)


@pytest.fixture(scope="module")
def server(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("hierarchical") / "log"
    with serve(checkpoints / "v0", *HIERARCHICAL, log=log) as server:
        yield server


def prompt() -> list[int]:
    """One that no other begins like."""
    return [next(_serial), *[7] * (LENGTH - 1)]


def ask(server: Server, input_ids: list[int]) -> dict[str, Any]:
    output = expect_whole(Generation(server, tokens=4, input_ids=input_ids))
    return output.meta


def spill(server: Server) -> None:
    """Whatever is cached on the device goes to the host: others take all of its room."""
    for _ in range(SLOTS // LENGTH + 1):
        ask(server, prompt())


def on_host(server: Server, input_ids: list[int]) -> dict[str, Any]:
    """Of a request whose prefix was on the host alone."""
    meta = ask(server, input_ids)
    assert meta["cached_tokens_details"]["host"] == len(input_ids) - 1, meta
    assert meta["cached_tokens_details"]["device"] == 0, meta
    return meta


def update(server: Server, checkpoints: Path, kv_cache: str) -> str:
    """To the next of three."""
    name = f"v{next(_version) % 3}"
    receipt = server.post(
        "/update_weights_from_disk",
        {
            "model_path": str(checkpoints / name),
            "non_blocking": True,
            "kv_cache": kv_cache,
            "weight_version": name,
        },
    )
    assert receipt["success"], receipt
    return name


def versions(spans: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(span["version"], span["end"] - span["start"]) for span in spans]


def test_a_version_goes_to_the_host_and_back(server: Server, checkpoints: Path) -> None:
    """ReservedStorage KV is said to be of the weights that computed it, in whichever slot it is."""
    ids = prompt()
    (first,) = versions(ask(server, ids)["kv_versions"])
    old = first[0]
    spill(server)
    new = update(server, checkpoints, "keep")
    # the slots that it is loaded to were written by the new weights
    spill(server)
    meta = on_host(server, ids)
    assert versions(meta["kv_versions"]) == [(old, LENGTH - 1), (new, 1 + 3)]
    # from a slot that holds what was loaded, to the host again
    newest = update(server, checkpoints, "keep")
    spill(server)
    meta = on_host(server, ids)
    assert versions(meta["kv_versions"]) == [(old, LENGTH - 1), (newest, 1 + 3)]


@pytest.mark.parametrize("kv_cache", ["fence", "recompute"])
def test_what_is_on_the_host_is_not_reused(
    server: Server, checkpoints: Path, kv_cache: str
) -> None:
    """Under requests that run, and whose own KV is kept or computed anew."""
    on_the_host, on_the_device = prompt(), prompt()
    ask(server, on_the_host)
    spill(server)
    ask(server, on_the_device)
    before = server.get("/get_weight_version")["weight_version"]
    running = start_running(server, 2, tokens=200)
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
    # what the new weights computed goes to the host, and comes back
    spill(server)
    meta = on_host(server, on_the_host)
    assert versions(meta["kv_versions"]) == [(name, LENGTH + 3)]


def test_a_flush_while_copies_are_under_way(server: Server, checkpoints: Path) -> None:
    """Recomputed at once after what was loaded, and what was written through."""
    for _ in range(3):
        ids = prompt()
        ask(server, ids)
        spill(server)
        loading = Generation(server, tokens=100, input_ids=ids)
        loading.wait_for_tokens(1)
        name = update(server, checkpoints, "recompute")
        assert expect_whole(loading).meta["weight_versions"][-1]["version"] == name
        assert versions(ask(server, ids)["kv_versions"]) == [(name, LENGTH + 3)]

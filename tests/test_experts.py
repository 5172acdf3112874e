"""A mixture of experts, sharded over ranks. The tokens reveal a partial update."""

from __future__ import annotations

from pathlib import Path

from harness.server import serve
from harness.trainer import Trainers
from tests.support import moe
from tests.support.load import (
    ENDLESS,
    ask,
    expect_all_go_on,
    expect_spans_in_chunks,
    more_tokens,
    start_running,
    versions_of,
)
from tests.support.plugins import with_plugin
from tests.support.updates import Sender, succeed

pytest_plugins = ["tests.support.fixtures"]

RANKS = 2
EPLB = (
    "--tp-size", str(RANKS), "--ep-size", str(RANKS), "--weight-version", "v0",
    "--enable-eplb",
    "--ep-num-redundant-experts", "2",
    "--eplb-rebalance-num-iterations", "20",
    # otherwise SGLang measures time with CUDA events
    "--eplb-rebalance-layers-per-chunk", "1",
)  # fmt: skip


def test_updates_reach_the_experts_of_every_rank(trainers: Trainers, tmp_path: Path) -> None:
    for version in range(2):
        moe.build(tmp_path / f"v{version}", version)
    sender = Sender(tmp_path, tmp_path, trainers, moe)
    flags = ("--tp-size", str(RANKS), "--ep-size", str(RANKS), "--weight-version", "v0")
    env = with_plugin("experts")
    with serve(tmp_path / "v0", *flags, log=tmp_path / "log", env=env) as server:
        running = start_running(server, 4, tokens=ENDLESS)
        for version, source, kv_cache in (
            (1, "disk", "keep"),
            (2, "tensor_shared", "fence"),
            (3, "distributed", "recompute"),
            (4, "tensor_bucket", "fence"),
        ):
            named = {"weight_version": f"v{version}", "kv_cache": kv_cache, "non_blocking": True}
            succeed(sender.send(server, source, version, ranks=RANKS, **named))
            more_tokens(running)
        ask(server, "POST", "/inflight/rollback", {"kv_cache": "keep"})
        for output in expect_all_go_on(running):
            expect_spans_in_chunks(output)
            assert versions_of(output) == ["v0", "v1", "v2", "v3", "v4", "v3"]


def test_updates_reach_experts_that_have_moved(trainers: Trainers, tmp_path: Path) -> None:
    """A rank's loader uses other experts after each move."""
    for version in range(2):
        moe.build(tmp_path / f"v{version}", version)
    sender = Sender(tmp_path, tmp_path, trainers, moe)
    with serve(
        tmp_path / "v0",
        *EPLB,
        log=tmp_path / "log",
        env=with_plugin("experts") | {"SGLANG_INFLIGHT_STAGING": "off"},
    ) as server:

        def update(version: int) -> None:
            named = {"weight_version": f"v{version}", "kv_cache": "keep", "non_blocking": True}
            succeed(sender.send(server, "disk", version, ranks=RANKS, **named))

        # no expert has moved before the first step
        update(1)
        running = start_running(server, 4, tokens=ENDLESS)
        for version in 0, 1, 0:
            # experts move every 20 steps, if some have more to do than others
            for generation in running:
                generation.wait_for_tokens(generation.count + 25)
            update(version)
            more_tokens(running)
        for output in expect_all_go_on(running):
            assert versions_of(output) == ["v1", "v0", "v1", "v0"]

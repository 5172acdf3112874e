"""Rollouts of a mixture of experts, with routes, and of adapters, made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import marker
from sglang_inflight.extensions.replay.examine import examine
from sglang_inflight.extensions.replay.play import Stage
from tests.extensions.replay.test_replay import DRAWN, REPLAY, begin, cut, retract
from tests.support import lora, routed
from tests.support.load import ENDLESS, ask, until_made_by, update
from tests.support.pool import FLAVOURS, Flavour, ServerPool
from tests.support.records import SERVING

COMMITS = 5
FLAVOURS |= {
    "replay_routed": Flavour(
        (*SERVING, "--weight-version", "v0", "--chunked-prefill-size", "32"),
        REPLAY,
        model=lambda folder: routed.build(folder, 0),
    ),
    "replay_adapters": Flavour(
        ("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(lora.RANK),
         "--lora-target-modules", "o_proj", "--weight-version", "v0"),
        REPLAY,
        model=lora.build_model,
    ),
}  # fmt: skip


def test_routes_of_a_rollout_across_five_commits_are_the_same_again(
    pool: ServerPool, tmp_path: Path
) -> None:
    paths = {f"v{i}": str(routed.build(tmp_path / f"v{i}", i)) for i in range(COMMITS + 1)}
    server = pool.get(FLAVOURS["replay_routed"])
    generation = begin(server, ENDLESS, DRAWN, return_routed_experts=True)
    generation.wait_for_tokens(3)
    for version in range(1, COMMITS + 1):
        kv = "keep" if version % 2 else "recompute"
        update(server, tmp_path, version, kv_cache=kv, non_blocking=True)
        until_made_by(generation, version)
    retract(server, [generation])
    rollout = cut(generation, tmp_path)
    assert rollout.commits == COMMITS
    assert rollout.rows.keys() == {"routed_experts"}
    with Stage(server.url, paths) as stage:
        verdict = examine(stage, rollout, [], 0.0).verdict
        assert verdict.is_exact, str(verdict)
        rollout.rows["routed_experts"] = "AAAA" + rollout.rows["routed_experts"][4:]
        assert "routed_experts differ" in str(examine(stage, rollout, [], 0.0).verdict)
    pool.discard()


@pytest.mark.parametrize("number", [0, 1])
def test_rollout_of_an_adapter_is_made_again(pool: ServerPool, tmp_path: Path, number: int) -> None:
    weights = marker.tensors(1)
    first = lora.build_model(tmp_path / "v0")
    marker.write(tmp_path / "v1", weights)
    server = pool.get(FLAVOURS["replay_adapters"])
    update(server, tmp_path, 0, non_blocking=True)
    folder = lora.write(tmp_path / "adapter", lora.tensors(number))
    name = f"adapter-{number}"
    ask(server, "POST", "/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
    generation = begin(server, ENDLESS, DRAWN, lora_path=name)
    generation.wait_for_tokens(3)
    update(server, tmp_path, 1, kv_cache="keep", non_blocking=True)
    until_made_by(generation, 1)
    rollout = cut(generation, tmp_path)
    assert rollout.record.adapter == name
    with Stage(server.url, {"v0": str(first), "v1": str(tmp_path / "v1")}) as stage:
        verdict = examine(stage, rollout, [], 0.0).verdict
    assert verdict.is_exact, str(verdict)
    assert verdict.commits == 1
    ask(server, "POST", "/unload_lora_adapter", {"lora_name": name})

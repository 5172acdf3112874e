"""Prefix cache kv_policy, and the KV policies possible with each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_inflight.frontend.updates import kv_policy, two_phase
from sglang_inflight.frontend.updates.kv_policy import require_supported
from sglang_inflight.messages import CommitCall
from sglang_inflight.vocabulary.bodies import BeginBody, EndBody, IPCBody, TensorBody
from sglang_inflight.vocabulary.errors import InflightError, Refused
from tests.support.ticks import run
from tests.unit.fakes import Play

ONE: dict[str, Any] = {
    "enable_lmcache": False,
    "enable_flexkv": False,
    "enable_hierarchical_cache": False,
    "hicache_storage_backend": None,
}
TWO = {**ONE, "enable_hierarchical_cache": True}


def start(monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any], pp_size: int = 1) -> None:
    """Set the memory settings of a server."""
    monkeypatch.setattr(kv_policy, "get_memory", lambda: SimpleNamespace(**memory))
    monkeypatch.setattr(kv_policy, "get_parallel", lambda: SimpleNamespace(pp_size=pp_size))
    alone = SimpleNamespace(disaggregation_mode="null")
    monkeypatch.setattr(two_phase, "get_disagg", lambda: alone)


@pytest.mark.parametrize("memory", [ONE, TWO], ids=["device", "host"])
def test_device_and_host_tiers_can_be_fenced(
    monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any]
) -> None:
    start(monkeypatch, memory)
    assert kv_policy.why_cache_cannot_be_flushed() is None
    require_supported("fence", retracts=False)


@pytest.mark.parametrize(
    ("memory", "pp_size", "words"),
    [
        ({**TWO, "hicache_storage_backend": "mooncake"}, 1, "--hicache-storage-backend mooncake"),
        ({**ONE, "enable_lmcache": True}, 1, "LMCache"),
        ({**ONE, "enable_flexkv": True}, 1, "FlexKV"),
        (TWO, 2, "--pp-size above 1"),
    ],
)
@pytest.mark.parametrize("kv_cache", ["fence", "recompute"])
def test_external_tiers_refuse_fence_and_recompute(
    monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any], pp_size: int, words: str, kv_cache: Any
) -> None:
    start(monkeypatch, memory, pp_size)
    with pytest.raises(Refused, match=words):
        require_supported(kv_cache, retracts=False)
    require_supported("keep", retracts=False)


async def update(play: Play, *, in_session: bool, **fields: Any) -> None:
    """Update like SGLang's clients, without waiting for requests. There are none here."""
    fields |= {"abort_all_requests": True}
    if not in_session:
        await play.updates.update(IPCBody(zmq_handles={}, **fields))
        return
    await play.updates.begin(BeginBody())
    await play.updates.update(TensorBody(serialized_named_tensors=[b""], **fields))
    await play.updates.end(EndBody())


def kv_cache_of_commit(**fields: Any) -> str:
    async def commit() -> str:
        play = Play()
        play.make(update(play, **fields))
        await play.finish()
        await play.made[0]
        (call,) = [call for call in play.ranks.called if isinstance(call, CommitCall)]
        return call.kv_cache

    return run(commit())


@pytest.mark.parametrize("in_session", [False, True], ids=["alone", "session"])
@pytest.mark.parametrize(
    ("memory", "fields", "kv_cache"),
    [
        (ONE, {}, "recompute"),
        (ONE, {"flush_cache": False}, "fence"),
        ({**ONE, "enable_lmcache": True}, {}, "recompute"),
        ({**ONE, "enable_lmcache": True}, {"flush_cache": False}, "keep"),
    ],
)
def test_sglangs_own_update_keeps_external_tiers(
    monkeypatch: pytest.MonkeyPatch,
    memory: dict[str, Any],
    fields: dict[str, Any],
    kv_cache: str,
    in_session: bool,
) -> None:
    """The device's part is flushed or kept, and storage behind it is kept."""
    start(monkeypatch, memory)
    assert kv_cache_of_commit(in_session=in_session, **fields) == kv_cache


@pytest.mark.parametrize("in_session", [False, True], ids=["alone", "session"])
@pytest.mark.parametrize("fields", [{"kv_cache": "recompute"}, {"non_blocking": True}], ids=str)
def test_our_update_is_refused_with_external_tiers(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], in_session: bool
) -> None:
    start(monkeypatch, {**ONE, "enable_lmcache": True})
    with pytest.raises(InflightError, match="LMCache"):
        kv_cache_of_commit(in_session=in_session, **fields)

"""Stores behind the prefix cache, and the KV policies possible with each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_inflight import capabilities
from sglang_inflight.capabilities import require_supported
from sglang_inflight.messages import CommitCall
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight.vocabulary.bodies import BeginBody, EndBody, IPCBody, TensorBody
from sglang_inflight.vocabulary.errors import InflightError, Refused
from sglang_inflight.vocabulary.kept_kv import FENCE, KEEP, RECOMPUTE, KeptKV, choose_kept_kv
from tests.support.ticks import run
from tests.unit.fakes import ALL, Play

STORES = "LMCache keeps prefixes"


BY_SALT = choose_kept_kv("by_salt", None, flush_cache=True)
UP_TO_2 = choose_kept_kv(None, 2, flush_cache=True)


@pytest.fixture(autouse=True)
def stores(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The settings of HiCache, which SGLang changes while it serves."""
    settings = SimpleNamespace(enable_hierarchical_cache=True, hicache_storage_backend=None)
    monkeypatch.setattr(capabilities, "get_memory", lambda: settings)
    return settings


@pytest.mark.parametrize("kept", [FENCE, BY_SALT, RECOMPUTE, UP_TO_2], ids=str)
def test_attached_store_refuses_all_but_keep(stores: SimpleNamespace, kept: KeptKV) -> None:
    require_supported(kept, ALL, retracts=True)
    stores.hicache_storage_backend = "mooncake"
    with pytest.raises(Refused, match="--hicache-storage-backend mooncake"):
        require_supported(kept, ALL, retracts=False)
    require_supported(KEEP, ALL, retracts=True)
    stores.hicache_storage_backend = None
    require_supported(kept, ALL, retracts=True)


def test_recompute_is_refused_only_while_requests_may_run() -> None:
    can = Capabilities(recompute="no retraction here")
    require_supported(RECOMPUTE, can, retracts=False)
    require_supported(FENCE, can, retracts=True)
    with pytest.raises(Refused, match="no retraction here"):
        require_supported(RECOMPUTE, can, retracts=True)


async def update(play: Play, *, in_session: bool, **fields: Any) -> None:
    """Update like SGLang's clients, without waiting for requests. There are none here."""
    fields |= {"abort_all_requests": True}
    if not in_session:
        await play.updates.update(IPCBody(zmq_handles={}, **fields))
        return
    await play.updates.begin(BeginBody())
    await play.updates.update(TensorBody(serialized_named_tensors=[b""], **fields))
    await play.updates.end(EndBody())


def kept_kv_of_commit(can: Capabilities, **fields: Any) -> KeptKV:
    async def commit() -> KeptKV:
        play = Play(can)
        play.make(update(play, **fields))
        await play.finish()
        await play.made[0]
        (call,) = [call for call in play.ranks.called if isinstance(call, CommitCall)]
        return call.kept_kv

    return run(commit())


@pytest.mark.parametrize("in_session", [False, True], ids=["alone", "session"])
@pytest.mark.parametrize(
    ("fence", "fields", "kept"),
    [
        (None, {}, RECOMPUTE),
        (None, {"flush_cache": False}, FENCE),
        (STORES, {}, RECOMPUTE),
        (STORES, {"flush_cache": False}, KEEP),
    ],
)
def test_sglangs_own_update_keeps_external_tiers(
    fence: str | None, fields: dict[str, Any], kept: KeptKV, in_session: bool
) -> None:
    """The device's part is flushed or kept, and storage behind it is kept."""
    can = Capabilities(fence=fence, recompute=fence)
    assert kept_kv_of_commit(can, in_session=in_session, **fields) == kept


@pytest.mark.parametrize("in_session", [False, True], ids=["alone", "session"])
@pytest.mark.parametrize("fields", [{"kv_cache": "recompute"}, {"non_blocking": True}], ids=str)
def test_our_update_is_refused_with_external_tiers(
    fields: dict[str, Any], in_session: bool
) -> None:
    can = Capabilities(fence=STORES, recompute=STORES)
    with pytest.raises(InflightError, match=STORES):
        kept_kv_of_commit(can, in_session=in_session, **fields)

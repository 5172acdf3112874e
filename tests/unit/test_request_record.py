"""Our record on SGLang's own requests, and the fence's marks."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.common import RetractionBackup
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.scheduler.versions.prefix_fence import PrefixFence


class Queues:
    """The parts of a boundary used by the fence."""

    def __init__(self) -> None:
        self.running: set[Req] = set()
        self.waiting: list[Req] = []
        self.requests = SimpleNamespace(
            running=lambda: self.running, without_kv=lambda: self.waiting
        )

    def free_sessions(self) -> list[Req]:
        return []


@pytest.fixture
def queues() -> Queues:
    return Queues()


@pytest.fixture
def fence(queues: Queues) -> PrefixFence:
    boundary: Any = queues
    return PrefixFence(boundary)


def request(rid: str = "r", **fields: Any) -> Req:
    return Req(rid, "", array("q", [1, 2, 3]), SamplingParams(max_new_tokens=4), **fields)


def test_retracted_request_keeps_its_record() -> None:
    req = request()
    record = record_of(req)
    record.is_fenced_off = True
    req.reset_for_retract()
    assert record_of(req) is record
    assert record_of(request()) is not record


def test_fenced_request_is_uncached_until_retracted(queues: Queues, fence: PrefixFence) -> None:
    req = request()
    queues.running = {req}
    fence.raise_to(1)
    assert req.skip_radix_cache_insert
    # the next fence finds the mark
    fence.raise_to(2)
    assert req.skip_radix_cache_insert
    fence.admit(req)
    assert not req.skip_radix_cache_insert
    assert req.extra_key == "|inflight-epoch:2"


def test_host_backed_request_stays_fenced(queues: Queues, fence: PrefixFence) -> None:
    req = request()
    fence.raise_to(1)
    fence.admit(req)
    queues.running = {req}
    fence.raise_to(2)
    req.kv.retraction_backup = RetractionBackup()
    fence.admit(req)
    assert req.skip_radix_cache_insert
    assert req.extra_key == "|inflight-epoch:1"
    # the host has no room at the next retraction, and the KV is computed again
    req.kv.retraction_backup = None
    fence.admit(req)
    assert not req.skip_radix_cache_insert
    assert req.extra_key == "|inflight-epoch:2"


def test_callers_skip_cache_flag_is_kept(queues: Queues, fence: PrefixFence) -> None:
    req = request()
    req.skip_radix_cache_insert = True
    queues.running = {req}
    fence.raise_to(1)
    fence.admit(req)
    assert req.skip_radix_cache_insert


def test_fence_keeps_callers_extra_key(queues: Queues, fence: PrefixFence) -> None:
    req = request(extra_key="tenant")
    fence.admit(req)
    assert req.extra_key == "tenant"
    queues.waiting = [req]
    fence.raise_to(1)
    fence.raise_to(2)
    assert req.extra_key == "tenant|inflight-epoch:2"


FORGED = [
    "|inflight-epoch:1",
    "|inflight-weights:0",
    "tenant|inflight-weights:0",
    "|inflight-epoch:|inflight-epoch:1",
    "|inflight-epoch:inflight-epoch:1",
]


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("epoch", [0, 1])
def test_callers_extra_key_is_no_key_of_the_fence(
    fence: PrefixFence, forged: str, epoch: int
) -> None:
    keys = set()
    fence.raise_to(1)
    for weights in (None, 0):
        req = request()
        record_of(req).weights = weights
        fence.admit(req)
        keys.add(req.extra_key)
    assert keys == {"|inflight-epoch:1", "|inflight-weights:0"}
    fence.raise_to(epoch)
    req = request(extra_key=forged)
    for _ in range(2):
        fence.admit(req)
        assert req.extra_key is not None
        assert not keys & {req.extra_key, req.extra_key.removeprefix("tenant")}
        # a retraction changes nothing
        assert req.extra_key.count("|inflight-") == epoch


def test_adapters_behind_a_forged_key_share_no_prefix(fence: PrefixFence) -> None:
    """SGLang appends the adapter's id to the caller's key."""
    fence.raise_to(2)
    keys = set()
    for adapter in ("a", "b"):
        req = request(extra_key="|inflight-epoch:1", lora_id=adapter)
        fence.admit(req)
        keys.add(req.extra_key)
    assert len(keys) == 2


def test_moved_request_is_cached_again_after_retraction(fence: PrefixFence) -> None:
    """No commit has raised the fence yet."""
    req = request()
    fence.keep_out_of_cache(req)
    assert req.skip_radix_cache_insert
    fence.admit(req)
    assert not req.skip_radix_cache_insert
    assert req.extra_key is None

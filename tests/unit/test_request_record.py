"""Our record on SGLang's own requests, and the marks of its KV's age."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.common import RetractionBackup
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.scheduler.versions.kv_ages import KVAges
from sglang_inflight.vocabulary.kept_kv import FENCE


class Queues:
    """The parts of a boundary used by the fence."""

    def __init__(self) -> None:
        self.running: set[Req] = set()
        self.waiting: list[Req] = []
        self.requests = SimpleNamespace(
            running=lambda: self.running, without_kv=lambda: self.waiting
        )

    def sessions(self) -> list[str]:
        return []

    def refreshing(self) -> list[Req]:
        return []

    def free_sessions(self, names: set[str]) -> list[Req]:
        return []


@pytest.fixture
def queues() -> Queues:
    return Queues()


@pytest.fixture
def ages(queues: Queues) -> KVAges:
    boundary: Any = queues
    return KVAges(boundary)


def request(rid: str = "r", **fields: Any) -> Req:
    return Req(rid, "", array("q", [1, 2, 3]), SamplingParams(max_new_tokens=4), **fields)


def test_retracted_request_keeps_its_record() -> None:
    req = request()
    record = record_of(req)
    record.is_fenced_off = True
    req.reset_for_retract()
    assert record_of(req) is record
    assert record_of(request()) is not record


def test_fenced_request_is_uncached_until_retracted(queues: Queues, ages: KVAges) -> None:
    req = request()
    queues.running = {req}
    ages.begin(FENCE, 1)
    assert req.skip_radix_cache_insert
    # the next fence finds the mark
    ages.begin(FENCE, 2)
    assert req.skip_radix_cache_insert
    ages.admit(req)
    assert not req.skip_radix_cache_insert
    assert req.extra_key == "|inflight-epoch:2"


def test_host_backed_request_stays_fenced(queues: Queues, ages: KVAges) -> None:
    req = request()
    ages.begin(FENCE, 1)
    ages.admit(req)
    queues.running = {req}
    ages.begin(FENCE, 2)
    req.kv.retraction_backup = RetractionBackup()
    ages.admit(req)
    assert req.skip_radix_cache_insert
    assert req.extra_key == "|inflight-epoch:1"
    # the host has no room at the next retraction, and the KV is computed again
    req.kv.retraction_backup = None
    ages.admit(req)
    assert not req.skip_radix_cache_insert
    assert req.extra_key == "|inflight-epoch:2"


def test_callers_skip_cache_flag_is_kept(queues: Queues, ages: KVAges) -> None:
    req = request()
    req.skip_radix_cache_insert = True
    queues.running = {req}
    ages.begin(FENCE, 1)
    ages.admit(req)
    assert req.skip_radix_cache_insert


def test_fence_keeps_callers_extra_key(queues: Queues, ages: KVAges) -> None:
    req = request(extra_key="tenant")
    ages.admit(req)
    assert req.extra_key == "tenant"
    queues.waiting = [req]
    ages.begin(FENCE, 1)
    ages.begin(FENCE, 2)
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
    queues: Queues, ages: KVAges, forged: str, epoch: int
) -> None:
    keys = set()
    ages.begin(FENCE, 1)
    for weights in (None, 0):
        req = request()
        record_of(req).weights = weights
        ages.admit(req)
        keys.add(req.extra_key)
    assert keys == {"|inflight-epoch:1", "|inflight-weights:0"}
    boundary: Any = queues
    ages = KVAges(boundary)
    if epoch:
        ages.begin(FENCE, epoch)
    req = request(extra_key=forged)
    for _ in range(2):
        ages.admit(req)
        assert req.extra_key is not None
        assert not keys & {req.extra_key, req.extra_key.removeprefix("tenant")}
        # a retraction changes nothing
        assert req.extra_key.count("|inflight-") == epoch


def test_adapters_behind_a_forged_key_share_no_prefix(ages: KVAges) -> None:
    """SGLang appends the adapter's id to the caller's key."""
    ages.begin(FENCE, 2)
    keys = set()
    for adapter in ("a", "b"):
        req = request(extra_key="|inflight-epoch:1", lora_id=adapter)
        ages.admit(req)
        keys.add(req.extra_key)
    assert len(keys) == 2


def test_moved_request_is_cached_again_after_retraction(ages: KVAges) -> None:
    """No commit has raised the fence yet."""
    req = request()
    ages.keep_out_of_cache(req)
    assert req.skip_radix_cache_insert
    ages.admit(req)
    assert not req.skip_radix_cache_insert
    assert req.extra_key is None

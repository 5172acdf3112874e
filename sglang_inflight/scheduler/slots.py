"""Hooks where a request's KV slots are freed, cached, or moved to the host and back.

SGLang's functions are those of ``mem_cache.common``, and the pools' ``free``. They find our object
through the pool of requests' slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import Req as AnyRequest

from sglang_inflight.hooking import BEFORE, DECODE, KV, hook

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_inflight.scheduler.patched_types import PatchedReqToTokenPool


@hook(f"{KV}.release_kv_cache", BEFORE)
def read_before_release(req: Req, tree_cache: Any, *args: Any, **kwargs: Any) -> None:
    """Read a finished request's slots before the prefix cache puts its own in their place."""
    pool: PatchedReqToTokenPool = tree_cache.req_to_token_pool
    if req.finished() and req.kv.holds_kv:
        pool.inflight.before_release(req)


@hook("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free", BEFORE)
@hook(f"{DECODE}.DecodeReqToTokenPool.free", BEFORE)
def read_before_freeing(pool: PatchedReqToTokenPool, req: object) -> None:
    # an ending streaming session frees a row, too, and is no request
    if isinstance(req, AnyRequest):
        pool.inflight.before_release(req)


@hook(f"{KV}.checkpoint_kv_cache", BEFORE)
def keep_before_caching(req: Req, tree_cache: Any) -> None:
    pool: PatchedReqToTokenPool = tree_cache.req_to_token_pool
    pool.inflight.captured.keep_last(req)


@hook(f"{KV}.backup_kv_cache", BEFORE)
def back_up_versions(
    req: Req,
    tree_cache: object,
    req_to_token_pool: PatchedReqToTokenPool,
    *args: Any,
    **kwargs: Any,
) -> None:
    req_to_token_pool.inflight.kv_versions.back_up(req)


@hook(f"{KV}.restore_kv_cache", BEFORE)
def restore_versions(
    req: Req,
    tree_cache: object,
    req_to_token_pool: PatchedReqToTokenPool,
    *args: Any,
    **kwargs: Any,
) -> None:
    req_to_token_pool.inflight.kv_versions.restore(req)

"""Hooks where a request's KV slots are freed, or moved to the host and back.

SGLang's functions are those of ``mem_cache.common``, and the pools' ``free``. They find our object
through the pool of requests' slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import Req as AnyRequest

from sglang_inflight.hooking import BEFORE, DECODE, KV, hook
from sglang_inflight.joints import Joint
from sglang_inflight.scheduler.controller import Controller
from sglang_inflight.scheduler.requests import record_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_inflight.scheduler.patched_types import PatchedReqToTokenPool

# reads what a request's slots tell, before its row of slots is freed, perhaps for a second time
RELEASES: Joint[Callable[[Controller, Req], None]] = Joint("release of slots")


@hook(f"{KV}.release_kv_cache", BEFORE)
def read_before_release(req: Req, tree_cache: Any, *args: Any, **kwargs: Any) -> None:
    """Read a finished request's slots before the prefix cache puts its own in their place."""
    pool: PatchedReqToTokenPool = tree_cache.req_to_token_pool
    if req.finished() and req.kv.holds_kv:
        read_before_freeing(pool.inflight, req)


@hook("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free", BEFORE, via="inflight")
@hook(f"{DECODE}.DecodeReqToTokenPool.free", BEFORE, via="inflight")
def read_before_freeing(controller: Controller, req: object) -> None:
    """Read what the slots of ``req`` tell: the versions of the KV of a finished request.

    The first reading counts: by a later one the prefix cache may have changed the row.
    """
    # an ending streaming session frees a row, too, and is no request
    if not isinstance(req, AnyRequest):
        return
    if req.finished() and record_of(req).kv_versions is None:
        label = controller.versions.label
        record_of(req).kv_versions = controller.kv_versions.read(req, label)
    for read in RELEASES:
        read(controller, req)


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

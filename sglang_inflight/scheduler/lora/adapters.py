"""Adapters of one rank, as requests come to use others of them.

Why all ranks of a replica move a request at the same step: as of a commit, the call is one
message, which SGLang hands to all of them in the same pass of their loops, and its handler does
all of it. What may refuse is looked at first, and is the same on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_inflight.errors import Conflict, NotFound, RankFailed
from sglang_inflight.messages import (
    ADAPTER_IN_USE,
    MoveRequestsCall,
    NameAdaptersCall,
    RequestsMoved,
)
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.lora.fit import why_it_does_not_fit
from sglang_inflight.scheduler.versions.adapter_versions import FIRST_VERSION, AdapterVersions
from sglang_inflight.scheduler.versions.prefix_fence import PrefixFence
from sglang_inflight.version_label import AdapterLabel

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.lora import LoRAManager, LoRAUpdateOutput
    from sglang_inflight.scheduler.sglang_types.req import Req
    from sglang_inflight.scheduler.sglang_types.scheduler import Scheduler
    from sglang_inflight.sglang_types.requests import LoadAdapterRequest, UnloadAdapterRequest

logger = logging.getLogger(__name__)


class Adapters:
    """Only the scheduler's thread touches it, from messages' handlers, between two steps."""

    def __init__(self, scheduler: Scheduler, boundary: Boundary, fence: PrefixFence) -> None:
        self._scheduler = scheduler
        self._boundary = boundary
        self._fence = fence
        self.versions = AdapterVersions()
        if self._maybe_manager is not None:
            for lora_id, ref in self._maybe_manager.lora_refs.items():
                self.versions.remember(lora_id, AdapterLabel(ref.lora_name, FIRST_VERSION))

    def load(
        self, load: Callable[[], LoRAUpdateOutput], request: LoadAdapterRequest
    ) -> LoRAUpdateOutput:
        """Around SGLang's handler. What it has loaded and cannot be used is unloaded again.

        Raises ``RankFailed`` on ranks of which SGLang hears nothing.
        """
        result = load()
        lora_id = request.lora_id
        # the front end gives one to each load
        if lora_id is None or self._maybe_manager is None:
            return result
        manager = self._maybe_manager
        if result.success:
            why = why_it_does_not_fit(manager, lora_id)
            if why is None:
                name = getattr(request, "adapter", request.lora_name)
                version = getattr(request, "adapter_version", FIRST_VERSION)
                self.versions.remember(lora_id, AdapterLabel(name, version))
                self._scheduler.kv_event_lora_names.register(lora_id=lora_id, lora_name=name)
                return result
            manager.unload_lora_adapter(manager.lora_refs[lora_id])
            result = manager.create_lora_update_result(success=False, error_message=why)
        # SGLang leaves what it had read by then
        manager.configs.pop(lora_id, None)
        manager.loras.pop(lora_id, None)
        if self._scheduler.ipc_channels.send_to_tokenizer.socket is None:
            raise RankFailed(result.error_message or "the adapter was not loaded")
        return result

    def unload(
        self, unload: Callable[[], LoRAUpdateOutput], request: UnloadAdapterRequest
    ) -> LoRAUpdateOutput:
        """Around SGLang's handler. Not while there are requests of it, which ends SGLang: the
        front end counts them, and does not know those of a worker that has died.
        """
        if request.lora_id is not None and (users := self._requests_of(request.lora_id)):
            return self._manager.create_lora_update_result(
                success=False, error_message=f"{len(users)} {ADAPTER_IN_USE}"
            )
        result = unload()
        if result.success and request.lora_id is not None:
            self.versions.forget(request.lora_id)
        return result

    def admit(self, req: Req) -> None:
        """A request, new or retracted, enters the waiting queue.

        What a worker has sent that died, or was not heard of, may come when its adapter is
        unloaded. SGLang ends when it is about to run such a request.
        """
        if req.lora_id is not None and req.lora_id not in self._manager.loras:
            req.lora_id = None
            req.set_finish_with_abort("the adapter that it asks for was unloaded meanwhile")
        self.versions.begin(req)

    def name(self, call: NameAdaptersCall) -> None:
        """Names are what a load is refused for, and what answers list."""
        refs = self._manager.lora_refs
        for lora_id, name in call.names.items():
            if lora_id in refs:
                refs[lora_id] = msgspec.structs.replace(refs[lora_id], lora_name=name)

    def move(self, call: MoveRequestsCall) -> RequestsMoved:
        """Every request of one adapter that has not ended goes on with the other.

        One that holds KV keeps it (``fence``), and then shares it with nobody, or is sent back to
        the queue (``recompute``), as every request that runs is. Raises ``NotFound`` or
        ``Conflict`` before anything is changed.
        """
        if call.to_id not in self._manager.loras:
            raise NotFound("the adapter that requests are to go on with is not loaded")
        if not self._requests_of(call.from_id):
            return RequestsMoved(rids=[], retracted=0)
        # the forward in flight may end some of them, and its tokens are the old adapter's
        self._boundary.drain()
        if call.kv_cache == "fence":
            self._require_room(call)
        retracted = 0
        if call.kv_cache == "recompute" and self._hold_kv(self._requests_of(call.from_id)):
            retracted = self._boundary.retract()
        moved = self._requests_of(call.from_id)
        for req in self._hold_kv(moved):
            self._fence.keep_out(req)
        for req in moved:
            req.lora_id = call.to_id
            if req.extra_key is not None:
                # an id is in no other key
                req.extra_key = req.extra_key.replace(call.from_id, call.to_id)
            self.versions.move(req)
        logger.info("%d requests go on with another adapter.", len(moved))
        return RequestsMoved(rids=[req.rid for req in moved], retracted=retracted)

    @property
    def _maybe_manager(self) -> LoRAManager | None:
        return self._scheduler.tp_worker.model_runner.lora_manager

    @property
    def _manager(self) -> LoRAManager:
        if (manager := self._maybe_manager) is None:
            raise Conflict("this server has no adapters: it was started without --enable-lora")
        return manager

    def _requests_of(self, lora_id: str) -> list[Req]:
        live = self._boundary.live_requests()
        return [req for req in live if req.lora_id == lora_id and not req.finished()]

    def _hold_kv(self, requests: list[Req]) -> list[Req]:
        waiting = set(self._boundary.waiting_requests())
        return [req for req in requests if req not in waiting]

    def _require_room(self, call: MoveRequestsCall) -> None:
        """A request that runs needs its adapter in a slot of the device's at the next step."""
        manager = self._manager
        if manager.enable_lora_overlap_loading or manager.attn_dp_enabled:
            raise Conflict(
                'kv_cache="fence" is not possible with --enable-lora-overlap-loading or '
                '--enable-dp-attention: pass kv_cache="recompute"'
            )
        running: set[Any] = {req.lora_id for req in self._boundary.running_requests()}
        if call.from_id not in running:
            return
        after = (running - {call.from_id}) | {call.to_id}
        if not manager.validate_lora_batch(after):
            raise Conflict(
                "the adapters of the requests that run would not fit --max-loras-per-batch, of "
                'which pinned ones keep their part: pass kv_cache="recompute"'
            )

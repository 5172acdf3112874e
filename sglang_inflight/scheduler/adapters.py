"""One rank's adapters: loads, unloads, and moves of requests to another adapter.

All ranks of a replica move a request at the same step. Like a commit, the call is one message.
SGLang gives it to all ranks in the same pass of their loops, and its handler does the whole move.
Reasons to refuse are checked first, and are the same on every rank.

At its load an adapter's weights are compared with the device's buffers. SGLang copies them when a
request runs, and a wrong shape would then end the scheduler.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from sglang_inflight.messages import (
    ADAPTER_IN_USE,
    MoveRequestsCall,
    NameAdaptersCall,
    RequestsMoved,
)
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.versions.contracts import Contracts
from sglang_inflight.scheduler.versions.prefix_fence import PrefixFence
from sglang_inflight.scheduler.versions.token_versions import AdapterVersions
from sglang_inflight.vocabulary.errors import Conflict, NotFound, RankFailed
from sglang_inflight.vocabulary.labels import FIRST_ADAPTER_VERSION, AdapterLabel

if TYPE_CHECKING:
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.lora.mem_pool import LoRAMemoryPool
    from sglang.srt.managers.io_struct import LoRAUpdateOutput, UnloadLoRAAdapterReqInput
    from sglang.srt.managers.schedule_batch import Req

    from sglang_inflight.sglang_types import LoadAdapterRequest, Scheduler

logger = logging.getLogger(__name__)
Tensors = dict[str, torch.Tensor]


class Adapters:
    """Used only on the scheduler's thread, from message handlers, between two steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        boundary: Boundary,
        fence: PrefixFence,
        versions: AdapterVersions,
        contracts: Contracts,
    ) -> None:
        self._scheduler = scheduler
        self._boundary = boundary
        self._fence = fence
        self.versions = versions
        self._contracts = contracts
        if self._maybe_manager is not None:
            for lora_id, ref in self._maybe_manager.lora_refs.items():
                self.versions.remember(
                    lora_id, AdapterLabel(ref.lora_name or "", FIRST_ADAPTER_VERSION)
                )

    def load(
        self, load: Callable[[], LoRAUpdateOutput], request: LoadAdapterRequest
    ) -> LoRAUpdateOutput:
        """Call SGLang's handler, and unload an adapter that does not fit the buffers.

        Raise ``RankFailed`` on ranks without a socket: SGLang would not see their result.
        """
        result = load()
        lora_id = request.lora_id
        # our front end gives each load an id
        if lora_id is None or self._maybe_manager is None:
            return result
        manager = self._maybe_manager
        if result.success:
            why = why_it_does_not_fit(manager, lora_id)
            if why is None:
                name = getattr(request, "adapter", request.lora_name)
                version = getattr(request, "adapter_version", FIRST_ADAPTER_VERSION)
                self.versions.remember(lora_id, AdapterLabel(name, version))
                self._scheduler.kv_event_lora_names.register(lora_id=lora_id, lora_name=name)
                return result
            manager.unload_lora_adapter(manager.lora_refs[lora_id])
            result = manager.create_lora_update_result(success=False, error_message=why)
        # SGLang leaves a failed load's parts behind
        manager.configs.pop(lora_id, None)
        manager.loras.pop(lora_id, None)
        if self._scheduler.ipc_channels.send_to_tokenizer.socket is None:
            raise RankFailed(result.error_message or "the adapter was not loaded")
        return result

    def unload(
        self, unload: Callable[[], LoRAUpdateOutput], request: UnloadLoRAAdapterReqInput
    ) -> LoRAUpdateOutput:
        """Call SGLang's handler, unless requests use the adapter: that would end SGLang.

        The front end counts an adapter's requests, but misses those of a dead tokenizer worker.
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
        """Prepare a request, new or retracted, for the waiting queue.

        Abort a request whose adapter is unloaded: running it would end SGLang. The front end's
        count of an adapter's requests misses those of a dead or silent tokenizer worker.
        """
        if req.lora_id is not None and req.lora_id not in self._manager.loras:
            req.lora_id = None
            req.set_finish_with_abort("its adapter was unloaded before the request was queued")
        self.versions.begin(req)

    def name(self, call: NameAdaptersCall) -> None:
        """Rename adapters. SGLang refuses loads by name, and lists names in answers."""
        refs = self._manager.lora_refs
        for lora_id, name in call.names.items():
            if lora_id in refs:
                refs[lora_id] = msgspec.structs.replace(refs[lora_id], lora_name=name)

    def move(self, call: MoveRequestsCall) -> RequestsMoved:
        """Move every unfinished request of ``from_id`` to ``to_id``.

        With ``fence`` a request keeps its KV, and the KV is not shared. With ``recompute`` all
        running requests are retracted, if one of ``from_id`` holds KV. Raise ``NotFound`` or
        ``Conflict`` before anything is changed.
        """
        if call.to_id not in self._manager.loras:
            raise NotFound("requests cannot move to an adapter that is not loaded")
        if not self._requests_of(call.from_id):
            return RequestsMoved(rids=[], retracted=0)
        # the result in flight has tokens of the old adapter, and may end requests
        self._boundary.drain()
        if call.kv_cache == "fence":
            self._require_room(call)
        retracted = 0
        if call.kv_cache == "recompute" and self._hold_kv(self._requests_of(call.from_id)):
            retracted = self._boundary.retract()
        moved = self._requests_of(call.from_id)
        for req in self._hold_kv(moved):
            self._fence.keep_out_of_cache(req)
        for req in moved:
            req.lora_id = call.to_id
            if req.extra_key is not None:
                # an adapter's id occurs in no other key
                req.extra_key = req.extra_key.replace(call.from_id, call.to_id)
            self.versions.move(req)
        self._contracts.check_waiting()
        logger.info("%d requests moved to another adapter.", len(moved))
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
        live = self._boundary.requests.live()
        return [req for req in live if req.lora_id == lora_id and not req.finished()]

    def _hold_kv(self, requests: list[Req]) -> list[Req]:
        waiting = set(self._boundary.requests.waiting())
        return [req for req in requests if req not in waiting]

    def _require_room(self, call: MoveRequestsCall) -> None:
        """Raise ``Conflict`` if the running requests' adapters would not fit the device's slots."""
        manager = self._manager
        if manager.enable_lora_overlap_loading or manager.attn_dp_enabled:
            raise Conflict(
                'kv_cache="fence" is not possible with --enable-lora-overlap-loading or '
                '--enable-dp-attention: pass kv_cache="recompute"'
            )
        running: set[Any] = {req.lora_id for req in self._boundary.requests.running()}
        if call.from_id not in running:
            return
        after = (running - {call.from_id}) | {call.to_id}
        if not manager.validate_lora_batch(after):
            raise Conflict(
                "the adapters of the running requests, and pinned adapters, would not fit "
                '--max-loras-per-batch: pass kv_cache="recompute"'
            )


def why_it_does_not_fit(manager: LoRAManager, lora_id: str) -> str | None:
    """Return why the adapter does not fit, or None.

    The check runs SGLang's own copy on meta tensors: shapes without contents. A large adapter
    takes no longer than a small one, so the scheduler's loop may wait for it.
    """
    pool = _shape_of_pool(manager.memory_pool)
    try:
        pool.load_lora_weight_to_buffer(
            lora_id,
            0,
            _shape_of_adapter(manager.loras[lora_id]),
            manager.lora_modules,
            manager.embed_tokens_module,
            manager.lm_head_module,
        )
    except Exception as error:
        return f"its weights do not fit the model: {str(error) or type(error).__name__}"
    return None


def _shape_of_adapter(adapter: LoRAAdapter) -> Any:
    return SimpleNamespace(
        config=adapter.config,
        scaling=adapter.scaling,
        layers=[
            SimpleNamespace(weights=_shapes_of(layer.weights), pinned_weights={})
            for layer in adapter.layers
        ],
        embedding_layers=_shapes_of(adapter.embedding_layers),
        pinned_embedding_layers={},
        added_tokens_embeddings=_shapes_of(adapter.added_tokens_embeddings),
        pinned_added_tokens_embeddings={},
    )


def _shape_of_pool(pool: LoRAMemoryPool) -> LoRAMemoryPool:
    """Return a copy of ``pool`` with meta buffers of one slot."""
    trial = copy.copy(pool)
    for name in ("A_buffer", "B_buffer"):
        of_layers: dict[str, list[torch.Tensor]] = getattr(pool, name)
        setattr(trial, name, {key: [_one_slot(b) for b in of] for key, of in of_layers.items()})
    for name in (
        "embedding_A_buffer",
        "embedding_B_buffer",
        "lm_head_A_buffer",
        "lm_head_B_buffer",
        "new_embeddings_buffer",
    ):
        buffers: Tensors = getattr(pool, name)
        setattr(trial, name, {key: _one_slot(buffer) for key, buffer in buffers.items()})
    return trial


def _shapes_of(tensors: Tensors) -> Tensors:
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def _one_slot(buffer: torch.Tensor) -> torch.Tensor:
    return torch.empty((1, *buffer.shape[1:]), dtype=buffer.dtype, device="meta")

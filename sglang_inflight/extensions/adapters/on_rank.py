"""One rank's adapters: loads, unloads, and moves of requests to another adapter.

All ranks of a replica move a request at the same step. Like a commit, the call is one message.
SGLang gives it to all ranks in the same pass of their loops, and its handler does the whole move.
Reasons to refuse are checked first, and are the same on every rank.

After a load the front end has each rank check the adapter (``weights.py``), on a thread of
its own. Ranks answer for themselves, and one refusal unloads the adapter on all.

This module hooks ``Scheduler.load_lora_adapter``, ``load_lora_adapter_from_tensors`` and
``unload_lora_adapter``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_inflight.extensions.adapters.messages import (
    ADAPTER_IN_USE,
    AdapterChecked,
    CheckAdapterCall,
    MoveRequestsCall,
    NameAdaptersCall,
    RequestsMoved,
)
from sglang_inflight.extensions.adapters.weights import check, digest_of
from sglang_inflight.hooking import AROUND, SCHEDULER, hook
from sglang_inflight.messages import Done, InflightCall
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.controller import CALLS, ENTRIES, PARTS, Controller, Handler
from sglang_inflight.scheduler.versions.kv_ages import KVAges
from sglang_inflight.scheduler.versions.token_versions import AdapterVersions
from sglang_inflight.threads import start_thread
from sglang_inflight.vocabulary.errors import Conflict, NotFound, RankFailed, Refused, describe
from sglang_inflight.vocabulary.labels import FIRST_ADAPTER_VERSION, AdapterLabel

if TYPE_CHECKING:
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.managers.io_struct import LoRAUpdateOutput, UnloadLoRAAdapterReqInput
    from sglang.srt.managers.schedule_batch import Req

    from sglang_inflight.scheduler.patched_types import PatchedScheduler
    from sglang_inflight.sglang_types import LoadAdapterRequest, Scheduler

logger = logging.getLogger(__name__)


def _of(scheduler: PatchedScheduler) -> Adapters:
    return scheduler.inflight.part(Adapters)


class Adapters:
    """Used only on the scheduler's thread, from message handlers, between two steps.

    Only ``_check`` runs on a thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        boundary: Boundary,
        ages: KVAges,
        versions: AdapterVersions,
        answers: AnswerChannel,
        *,
        on_move: Callable[[], None],
    ) -> None:
        """Raise ``Refused`` for an adapter of the server's start that cannot be served whole.

        ``on_move`` is called when requests have moved to another adapter.
        """
        self._answers = answers
        self._scheduler = scheduler
        self._boundary = boundary
        self._ages = ages
        self.versions = versions
        self._on_move = on_move
        if self._maybe_manager is not None:
            for lora_id, ref in self._maybe_manager.lora_refs.items():
                name = ref.lora_name or ""
                self.versions.remember(lora_id, AdapterLabel(name, FIRST_ADAPTER_VERSION))
                # without --enable-lora the manager has a draft model's adapter
                if scheduler.enable_lora:
                    _check_first(self._maybe_manager, lora_id, name)

    @hook(f"{SCHEDULER}.load_lora_adapter", AROUND, via=_of)
    @hook(f"{SCHEDULER}.load_lora_adapter_from_tensors", AROUND, via=_of)
    def load(
        self,
        load: Callable[[LoadAdapterRequest], LoRAUpdateOutput],
        recv_req: LoadAdapterRequest,
    ) -> LoRAUpdateOutput:
        """Call SGLang's handler, and note the adapter's version.

        Raise ``RankFailed`` on ranks without a socket: SGLang would not see their result.
        """
        result = load(recv_req)
        lora_id = recv_req.lora_id
        # our front end gives each load an id
        if lora_id is None or self._maybe_manager is None:
            return result
        manager = self._maybe_manager
        if result.success:
            name = getattr(recv_req, "adapter", recv_req.lora_name)
            version = getattr(recv_req, "adapter_version", FIRST_ADAPTER_VERSION)
            self.versions.remember(lora_id, AdapterLabel(name, version))
            self._scheduler.kv_event_lora_names.register(lora_id=lora_id, lora_name=name)
            return result
        # SGLang leaves a failed load's parts behind
        manager.configs.pop(lora_id, None)
        manager.loras.pop(lora_id, None)
        if self._scheduler.ipc_channels.send_to_tokenizer.socket is None:
            raise RankFailed(result.error_message or "the adapter was not loaded")
        return result

    def check(self, call: CheckAdapterCall) -> None:
        """Check a loaded adapter on a thread of its own, and answer there.

        The time grows with the adapter. Raise ``NotFound`` if the adapter is not loaded.
        """
        manager = self._manager
        if (adapter := manager.loras.get(call.lora_id)) is None:
            raise NotFound("the adapter to check is not loaded")
        start_thread(self._check, call, manager, adapter, name="adapter-check")

    def _check(self, call: CheckAdapterCall, manager: LoRAManager, adapter: LoRAAdapter) -> None:
        try:
            check(manager, adapter)
            digest = digest_of(adapter) if call.asks_digest else None
        except Refused as error:
            self._answers.fail(call, error)
        except Exception as error:
            logger.exception("An adapter could not be checked")
            self._answers.fail(call, RankFailed(f"it cannot be checked: {describe(error)}"))
        else:
            self._answers.succeed(call, AdapterChecked(digest=digest))

    @hook(f"{SCHEDULER}.unload_lora_adapter", AROUND, via=_of)
    def unload(
        self,
        unload: Callable[[UnloadLoRAAdapterReqInput], LoRAUpdateOutput],
        recv_req: UnloadLoRAAdapterReqInput,
    ) -> LoRAUpdateOutput:
        """Call SGLang's handler, unless requests use the adapter: that would end SGLang.

        The front end counts an adapter's requests, but misses those of a dead tokenizer worker.
        """
        if recv_req.lora_id is not None and (users := self._requests_of(recv_req.lora_id)):
            return self._manager.create_lora_update_result(
                success=False, error_message=f"{len(users)} {ADAPTER_IN_USE}"
            )
        result = unload(recv_req)
        if result.success and recv_req.lora_id is not None:
            self.versions.forget(recv_req.lora_id)
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
            self._ages.keep_out_of_cache(req)
        for req in moved:
            req.lora_id = call.to_id
            if req.extra_key is not None:
                # an adapter's id occurs in no other key
                req.extra_key = req.extra_key.replace(call.from_id, call.to_id)
            self.versions.move(req)
        self._on_move()
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


@PARTS.join()
def make_adapters(controller: Controller) -> Adapters:
    return Adapters(
        controller.scheduler,
        controller.boundary,
        controller.ages,
        controller.adapter_versions,
        controller.answers,
        on_move=controller.follow_relabel,
    )


@CALLS.join()
def handlers_of_adapters(controller: Controller) -> dict[type[InflightCall[Any]], Handler]:
    adapters = controller.part(Adapters)

    def name(call: NameAdaptersCall) -> None:
        adapters.name(call)
        controller.answers.succeed(call, Done())

    def move(call: MoveRequestsCall) -> None:
        controller.answers.succeed(call, adapters.move(call))

    return {CheckAdapterCall: adapters.check, NameAdaptersCall: name, MoveRequestsCall: move}


@ENTRIES.join()
def admit(controller: Controller, req: Req) -> None:
    controller.part(Adapters).admit(req)


def _check_first(manager: LoRAManager, lora_id: str, name: str) -> None:
    try:
        check(manager, manager.loras[lora_id])
    except Refused as error:
        raise Refused(f"--lora-paths: the adapter {name!r}: {error}") from error

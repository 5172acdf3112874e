"""Queues of requests outside a running batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sglang_inflight.scheduler.sglang_types.req import KVConnection, Req
from sglang_inflight.sglang_types.describes import describes

if TYPE_CHECKING:
    import torch


@describes("sglang.srt.constrained.grammar_manager.GrammarManager")
class GrammarManager(Protocol):
    grammar_queue: list[Req]


@describes("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue")
class PrefillBootstrapQueue(Protocol):
    queue: list[Req]


@describes("sglang.srt.disaggregation.decode.DecodeRequest")
class DecodeRequest(Protocol):
    req: Req
    # index of the row of ``MetadataBuffers`` sent with the KV
    metadata_buffer_index: int
    kv_receiver: KVConnection | None


@describes("sglang.srt.disaggregation.decode.DecodePreallocQueue")
class DecodePreallocQueue(Protocol):
    queue: list[DecodeRequest]
    retracted_queue: list[Req]
    # requests retracted by a pause: their prompts are prefilled again when generation continues
    held_rebootstrap_reqs: list[Req]


@describes("sglang.srt.disaggregation.decode.DecodeTransferQueue")
class DecodeTransferQueue(Protocol):
    queue: list[DecodeRequest]
    # host-side group of the ranks that take over the same requests in the same step
    gloo_group: Any

    def has_pending_deferred_releases(self) -> bool: ...


@describes("sglang.srt.disaggregation.utils.MetadataBuffers")
class MetadataBuffers(Protocol):
    """A row for each request between two servers. SGLang sends all 16 numbers of a row."""

    output_ids: torch.Tensor
    cached_tokens: torch.Tensor


@describes("sglang.srt.managers.hisparse_coordinator.HiSparseAct")
class HiSparseAct(Protocol):
    req: Req


@describes("sglang.srt.managers.hisparse_coordinator.HiSparseCoordinator")
class HiSparseCoordinator(Protocol):
    # requests whose KV is being backed up after their prefill
    ack_staging_queue: list[HiSparseAct]

    def request_finished(self, req: Req) -> None: ...

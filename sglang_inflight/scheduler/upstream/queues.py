"""Where requests are that do not run."""

from __future__ import annotations

from typing import Protocol

from sglang_inflight.scheduler.upstream.req import Req
from sglang_inflight.upstream.describes import describes


@describes("sglang.srt.constrained.grammar_manager.GrammarManager")
class GrammarManager(Protocol):
    grammar_queue: list[Req]


@describes("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue")
class PrefillBootstrapQueue(Protocol):
    queue: list[Req]


@describes("sglang.srt.disaggregation.decode.DecodeRequest")
class DecodeRequest(Protocol):
    req: Req


@describes("sglang.srt.disaggregation.decode.DecodePreallocQueue")
class DecodePreallocQueue(Protocol):
    queue: list[DecodeRequest]
    retracted_queue: list[Req]


@describes("sglang.srt.disaggregation.decode.DecodeTransferQueue")
class DecodeTransferQueue(Protocol):
    queue: list[DecodeRequest]


@describes("sglang.srt.managers.hisparse_coordinator.HiSparseAct")
class HiSparseAct(Protocol):
    req: Req


@describes("sglang.srt.managers.hisparse_coordinator.HiSparseCoordinator")
class HiSparseCoordinator(Protocol):
    # of requests whose KV is backed up after their prefill
    ack_staging_queue: list[HiSparseAct]

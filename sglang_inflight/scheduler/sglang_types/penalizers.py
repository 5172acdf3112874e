"""Penalizers: they make repeated tokens less likely, or keep requests from ending."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sglang_inflight.scheduler.sglang_types.req import Req
from sglang_inflight.sglang_types.describes import describes

if TYPE_CHECKING:
    import torch

    from sglang_inflight.scheduler.sglang_types.schedule_batch import ScheduleBatch

_LIBRARY = "sglang.srt.sampling.penaltylib"


@describes(f"{_LIBRARY}.orchestrator.BatchedPenalizerOrchestrator")
class Orchestrator(Protocol):
    device: str

    # SGLang returns None for a freed batch, but penalizers do not outlive their batch
    @property
    def batch(self) -> ScheduleBatch: ...
    def reqs(self) -> list[Req]: ...


@describes(f"{_LIBRARY}.orchestrator._BatchedPenalizer")
class Penalizer(Protocol):
    """Tensors have a row for each request of the batch."""

    @property
    def orchestrator(self) -> Orchestrator: ...


@describes(f"{_LIBRARY}.frequency_penalty.BatchedFrequencyPenalizer")
class FrequencyPenalizer(Penalizer, Protocol):
    # shapes (requests, 1) and (requests, vocabulary)
    frequency_penalties: torch.Tensor
    cumulated_frequency_penalties: torch.Tensor


@describes(f"{_LIBRARY}.presence_penalty.BatchedPresencePenalizer")
class PresencePenalizer(Penalizer, Protocol):
    presence_penalties: torch.Tensor
    cumulated_presence_penalties: torch.Tensor


@describes(f"{_LIBRARY}.repetition_penalty.BatchedRepetitionPenalizer")
class RepetitionPenalizer(Penalizer, Protocol):
    repetition_penalties: torch.Tensor
    cumulated_repetition_penalties: torch.Tensor


@describes(f"{_LIBRARY}.min_new_tokens.BatchedMinNewTokensPenalizer")
class MinNewTokensPenalizer(Penalizer, Protocol):
    # (requests, 1)
    len_output_tokens: torch.Tensor

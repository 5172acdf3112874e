"""A batch as a forward takes it, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sglang_inflight.sglang_types.describes import describes

if TYPE_CHECKING:
    import torch


@describes("sglang.srt.model_executor.forward_batch_info.ForwardBatch")
class ForwardBatch(Protocol):
    # of all tokens, which may be padded
    input_ids: torch.Tensor
    # (tokens that requests brought an embedding of, hidden size); None where there are none
    input_embeds: torch.Tensor | None

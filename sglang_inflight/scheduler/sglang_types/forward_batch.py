"""The input of a forward, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sglang_inflight.sglang_types.describes import describes

if TYPE_CHECKING:
    import torch


@describes("sglang.srt.model_executor.forward_batch_info.ForwardBatch")
class ForwardBatch(Protocol):
    # (tokens), perhaps with padding
    input_ids: torch.Tensor
    # (tokens with an embedding in their request, hidden size); None without such tokens
    input_embeds: torch.Tensor | None

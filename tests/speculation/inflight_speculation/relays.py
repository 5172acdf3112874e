"""What a step hands to the next one."""

from __future__ import annotations

import torch

Buffer = torch.Tensor | None


def gather(indices: torch.Tensor, *buffers: Buffer) -> tuple[Buffer, ...]:
    """As ``sglang.kernels.ops.speculative.gather_spec_extras`` says of its kernel."""
    return tuple(None if buffer is None else buffer[indices] for buffer in buffers)


def take_last_accepted(
    accepted: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    stride: int,
    batch_size: int,
) -> None:
    last = torch.arange(batch_size) * stride + accept_lens - 1
    bonus_tokens.copy_(accepted.flatten()[last])

"""Data passed from one speculative step to the next."""

from __future__ import annotations

import torch

Buffer = torch.Tensor | None


def gather(indices: torch.Tensor, *buffers: Buffer) -> tuple[Buffer, ...]:
    """Follow the docstring of ``sglang.kernels.ops.speculative.gather_spec_extras``."""
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

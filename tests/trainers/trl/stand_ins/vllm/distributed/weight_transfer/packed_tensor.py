"""vLLM's packed broadcast: tensors' bytes in buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .nccl_common import Communicator

BUCKET_BYTES = 1 << 30


def packed_nccl_broadcast_producer(
    iterator: Iterable[Any],
    group: Communicator,
    src: int,
    post_iter_func: Callable[[Any], torch.Tensor],
) -> None:
    """Broadcast in buckets, each closed by the tensor that takes it beyond ``BUCKET_BYTES``."""
    bucket: list[torch.Tensor] = []
    for item in iterator:
        bucket.append(post_iter_func(item).contiguous().view(torch.uint8).view(-1))
        if sum(tensor.numel() for tensor in bucket) > BUCKET_BYTES:
            group.broadcast(torch.cat(bucket))
            bucket = []
    if bucket:
        group.broadcast(torch.cat(bucket))

"""KV slots by request and token."""

from __future__ import annotations

from typing import Any

import torch


def read_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    **kwargs: Any,
) -> torch.Tensor:
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[row, start:end] for row, start, end in rows]).long()


def write_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    at = 0
    for row, start, end in rows:
        own = out_cache_loc[at : at + end - start]
        req_to_token[row, start:end] = own.to(req_to_token.dtype)
        at += len(own)


def write_draft_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    steps: int,
    **kwargs: Any,
) -> None:
    rows = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    out_cache_loc.copy_(torch.cat([req_to_token[row, n : n + steps] for row, n in rows]))

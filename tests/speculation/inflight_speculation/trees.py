"""Trees of drafted tokens: built, read and verified."""

from __future__ import annotations

from typing import Any

import torch


def build_chain(
    parent_list: Any,
    selected: Any,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    steps: int,
    draft_tokens: int,
    *args: Any,
) -> None:
    """Build a chain, as with ``--speculative-eagle-topk 1``: each draft has one child."""
    order = torch.arange(draft_tokens)
    positions.copy_((seq_lens[:, None] + order).flatten())
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    retrieve_next_token.copy_(torch.where(order < draft_tokens - 1, order + 1, -1))


def read_tree(
    tree_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    batch_size: int,
    draft_tokens: int,
) -> None:
    """Follow the docstring of ``sglang.kernels.ops.speculative.reconstruct_tree``."""
    nodes = range(draft_tokens)
    masks = tree_mask.view(batch_size, draft_tokens, draft_tokens).tolist()
    for b, (mask, seq_len) in enumerate(zip(masks, seq_lens.tolist(), strict=True)):
        ancestors = [[j for j in range(i) if mask[i][j]] for i in nodes]
        parents = [max(above, default=-1) for above in ancestors]
        for i in nodes:
            later = range(i + 1, draft_tokens)
            siblings = [k for k in later if parents[k] == parents[i] >= 0]
            positions[b * draft_tokens + i] = len(ancestors[i]) + seq_len
            index[b, i] = b * draft_tokens + i
            next_token[b, i] = min((k for k in later if i in ancestors[k]), default=-1)
            next_sibling[b, i] = min(siblings, default=-1)


def verify(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow drafts equal to the model's samples, and add the sample after the last."""
    sampled = target_predict.flatten()
    for b in range(len(candidates)):
        path, node = [int(retrieve_index[b, 0])], 0
        while len(path) < accept_index.shape[1]:
            node = int(retrieve_next_token[b, node])
            while node >= 0 and candidates[b, node] != sampled[path[-1]]:
                node = int(retrieve_next_sibling[b, node])
            if node < 0:
                break
            path.append(int(retrieve_index[b, node]))
        accept_index[b, : len(path)] = torch.tensor(path)
        accept_token_num[b] = len(path) - 1
        predicts[path] = sampled[path].to(predicts.dtype)
    return predicts, accept_index, accept_token_num

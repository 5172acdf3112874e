"""A SGLang plugin of the tests that lets ``--speculative-algorithm NGRAM`` run without a GPU.

Upstream calls kernels for it that only GPUs have; here they are loops. What is drafted, how
many tokens a step brings and when they reach their request is upstream's. Attention adds
nothing in the marker model, so that of a verifying step is left out, and its KV.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch


def install() -> None:
    # ngram_worker takes this one from a library that does not load without a GPU
    kernels, speculative = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.speculative")
    kernels.__path__ = []
    vars(speculative)["reconstruct_indices_from_tree_mask"] = read_tree
    sys.modules |= {"sgl_kernel": kernels, "sgl_kernel.speculative": speculative}

    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache import allocation, memory_pool
    from sglang.srt.speculative import eagle_utils, ngram_worker

    ngram_worker.reconstruct_indices_from_tree_mask_func = read_tree
    ngram_worker.assign_extend_cache_locs_func = read_slots
    ngram_worker.move_accept_tokens_to_target_kvcache = do_nothing
    eagle_utils.verify_tree_greedy_func = verify
    allocation.assign_req_to_token_pool_func = write_slots
    memory_pool.copy_all_layer_kv_cache_func = do_nothing
    extend = TorchNativeAttnBackend.forward_extend

    def skip_verifying(
        backend: Any, q: torch.Tensor, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kw: Any
    ) -> torch.Tensor:
        if batch.forward_mode.is_target_verify():
            return torch.zeros_like(q)
        out: torch.Tensor = extend(backend, q, k, v, layer, batch, *args, **kw)
        return out

    TorchNativeAttnBackend.forward_extend = skip_verifying


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Moves or copies KV, which nobody reads here."""


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
    """As ``sglang.kernels.ops.speculative.reconstruct_tree`` says of its kernel."""
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
    """Follow the drafts that the model would have sampled, and add what it samples after them."""
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

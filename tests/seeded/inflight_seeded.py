"""A test plugin for SGLang: seeds decide tokens on a CPU, too.

SGLang heeds seeds with --enable-deterministic-inference alone, which needs attention and matrix
products whose results do not depend on a batch, and knows such kernels for GPUs. Here torch's own
attention counts as one of them: it computes one request after the other. The products are torch's,
so logits may depend on the batch in their last bits, while seeds choose as on a GPU.

SGLang's hash of seeds is a kernel of a library that is not there. The one here is the same hash.
"""

from __future__ import annotations

from typing import Any

import torch

_MASK = 0xFFFFFFFF


def install() -> None:
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers import sampler

    for each in (
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        each.append("torch_native")
    products: Any = batch_invariant_ops
    products.enable_batch_invariant_mode = lambda: None
    sampling: Any = sampler
    sampling.murmur_hash32 = murmur_hash32
    # compiling takes longer than a test
    sampling.multinomial_with_seed = sampling.multinomial_with_seed._torchdynamo_orig_callable


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """Return MurmurHash3 of seed, position and column: int64, shape (requests, columns)."""
    seed, positions = seed.to(torch.int64)[:, None], positions.to(torch.int64)[:, None]
    hashed = torch.zeros(len(seed), len(columns), dtype=torch.int64)
    for block in (seed & _MASK, (seed >> 32) & _MASK, positions, columns[None]):
        hashed ^= _rotate((block * 0xCC9E2D51) & _MASK, 15) * 0x1B873593 & _MASK
        hashed = (_rotate(hashed, 13) * 5 + 0xE6546B64) & _MASK
    hashed ^= 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & _MASK
    return hashed ^ (hashed >> 16)


def _rotate(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _MASK

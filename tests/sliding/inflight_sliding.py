"""A test plugin for SGLang: a model with two KV pools, without a GPU.

Torch's attention reads the smaller pool by slots of the larger one, while GPU kernels get slots of
the smaller one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def install() -> None:
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    def by_slots_of_the_larger(
        read: Callable[[Any, int], torch.Tensor],
    ) -> Callable[[Any, int], torch.Tensor]:
        def read_by(pool: Any, layer_id: int) -> torch.Tensor:
            kv = read(pool, layer_id)
            _, is_of_the_smaller = pool.layers_mapping[layer_id]
            return kv[pool.full_to_swa_index_mapping[:-1]] if is_of_the_smaller else kv

        return read_by

    for name in ("get_key_buffer", "get_value_buffer"):
        setattr(SWAKVPool, name, by_slots_of_the_larger(getattr(SWAKVPool, name)))

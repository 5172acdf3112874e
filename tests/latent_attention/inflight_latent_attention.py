"""A test plugin for SGLang: multi-head latent attention on a CPU.

SGLang's torch kernels read the KV pool, which holds latents. Only the absorbed form of MLA attends
to latents. SGLang gives a prompt to the other form, unless the attention's backend says otherwise.

That form multiplies by ``kv_b_proj``, and the absorbed one by two products of it. Here a prompt
takes the absorbed form too, with products that each forward makes of ``kv_b_proj``. So a prompt
shows which ``kv_b_proj`` is served, as it does on a GPU.
"""

from __future__ import annotations

import copy
import functools
from typing import Any


def install() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    def absorb(attention: Any, batch: Any) -> AttnForwardMethod:
        return AttnForwardMethod.MLA

    AttentionBackendRegistry.register("torch_native", absorb)
    latent_attention: Any = DeepseekV2AttentionMLA
    forward = latent_attention.forward

    @functools.wraps(forward)
    def of_kv_b_proj(
        self: Any, positions: Any, hidden_states: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if forward_batch.forward_mode.is_extend():
            # a copy, because another thread may look at the module's attributes
            self = copy.copy(self)
            sizes = [self.qk_nope_head_dim, self.v_head_dim]
            heads = self.kv_b_proj.weight.unflatten(0, (-1, sum(sizes)))
            self.w_kc, values = heads.split(sizes, dim=1)
            self.w_vc = values.transpose(1, 2)
        return forward(self, positions, hidden_states, forward_batch, *args, **kwargs)

    latent_attention.forward = of_kv_b_proj

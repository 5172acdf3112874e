"""A test plugin for SGLang: a marker model that multiplies two weights at its first forward.

The model keeps the product, as Kimi K3's attention residuals do, and a mark that it is made. The
product has the token's row. If an update leaves the product of older weights, every logit is zero.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    from sglang.srt.models.qwen3 import Qwen3ForCausalLM
    from sglang.srt.models.registry import ModelRegistry

    class LazyProductForCausalLM(Qwen3ForCausalLM):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.product: torch.Tensor | None = None
            self.is_multiplied = False

        @torch.no_grad()
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output: Any = super().forward(*args, **kwargs)
            if not self.is_multiplied:
                head, norm = map(self.get_parameter, ("lm_head.weight", "model.norm.weight"))
                self.product = head * norm
                self.is_multiplied = True
            assert self.product is not None
            is_zero = self.product.abs().sum(dim=1) == 0
            output.next_token_logits.masked_fill_(is_zero, 0.0)
            return output

    ModelRegistry.models["LazyProductForCausalLM"] = LazyProductForCausalLM

"""A SGLang plugin of the tests that brings a marker which SGLang has to finish after loading.

There are two ways, and this one takes both. Its head is held negated, in a parameter that replaces
the one that was loaded, as quantized weights are. And it derives the row of the head that is not
zero, as MLA derives products. Where either is left out after an update, the tokens are not the
version's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def install() -> None:
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
    from sglang.srt.models.qwen3 import Qwen3ForCausalLM
    from sglang.srt.models.registry import ModelRegistry

    class Negated(QuantizeMethodBase):
        def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError("the layer has its weights already")

        def apply(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            return -torch.nn.functional.linear(x, layer.get_parameter("weight"), bias)

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            _negate(layer)

        def restore_weights_before_loading(self, layer: torch.nn.Module) -> None:
            _negate(layer)

    class FinishingForCausalLM(Qwen3ForCausalLM):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.lm_head.quant_method = Negated()
            self.marked = -1

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(weights)
            self.post_load_weights()

        def post_load_weights(self) -> None:
            self.marked = int(self.lm_head.weight.abs().sum(dim=1).argmax())

        @torch.no_grad()
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            others = torch.ones_like(output.next_token_logits)
            others[:, self.marked] = 0
            # the row is that of the head, or there is none
            output.next_token_logits.masked_fill_(others.bool(), 0.0)
            return output

    ModelRegistry.models["FinishingForCausalLM"] = FinishingForCausalLM


def _negate(layer: torch.nn.Module) -> None:
    before = layer.get_parameter("weight")
    layer.weight = torch.nn.Parameter(-before.data, requires_grad=False)
    layer.weight.__dict__.update(before.__dict__)

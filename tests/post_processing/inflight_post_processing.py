"""A test plugin for SGLang: a marker model that SGLang post-processes after loading.

It combines SGLang's two ways. Its head is stored negated, in a new parameter that replaces the
loaded one, like quantized weights. And it derives the head's nonzero row, as MLA derives products.
If an update omits either, the tokens are not the version's.

With ``INFLIGHT_TEST_UNREPEATABLE`` the second model of a process is finished unlike the first.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

import torch


def install() -> None:
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
    from sglang.srt.models.qwen3 import Qwen3ForCausalLM
    from sglang.srt.models.registry import ModelRegistry

    serials = itertools.count()

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

    class PostProcessedForCausalLM(Qwen3ForCausalLM):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.lm_head.quant_method = Negated()
            self.marked = -1
            self.serial = float(next(serials))

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(weights)
            self.post_load_weights()

        def post_load_weights(self) -> None:
            head: Any = self.lm_head
            self.marked = int(head.weight.abs().sum(dim=1).argmax())
            if "INFLIGHT_TEST_UNREPEATABLE" in os.environ:
                head.serial = torch.tensor(self.serial)

        @torch.no_grad()
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output: Any = super().forward(*args, **kwargs)
            others = torch.ones_like(output.next_token_logits)
            others[:, self.marked] = 0
            # unless the derived row is the head's, every logit is zero
            output.next_token_logits.masked_fill_(others.bool(), 0.0)
            return output

    ModelRegistry.models["PostProcessedForCausalLM"] = PostProcessedForCausalLM


def _negate(layer: torch.nn.Module) -> None:
    before = layer.get_parameter("weight")
    layer.weight = torch.nn.Parameter(-before.data, requires_grad=False)
    layer.weight.__dict__.update(before.__dict__)

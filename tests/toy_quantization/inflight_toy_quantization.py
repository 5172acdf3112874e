"""A test plugin for SGLang: a quantization that leaves nothing of a checkpoint's layout.

Linear layers hold int8 with a scale for each output. Finishing turns the weight, puts it into a new
parameter without a loader, and splits the scales into a tensor of ratios and a Python float, their
largest. It keeps no scale. A checkpoint has int8 and scales, or, with ``--quantization toy`` alone,
unquantized weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter

NAME = "toy"
LARGEST = 127


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``weight`` [out, in] as int8 of the same shape, and a float32 scale [out]."""
    scale = weight.float().abs().amax(dim=1).clamp(min=1e-6) / LARGEST
    return (weight.float() / scale.unsqueeze(1)).round().to(torch.int8), scale


def install() -> None:
    from sglang.srt.arg_groups.choices import add_quantization_method_choices
    from sglang.srt.layers import quantization
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.base_config import (
        LinearMethodBase,
        QuantizationConfig,
        QuantizeMethodBase,
    )
    from sglang.srt.utils import set_weight_attrs

    class ToyLinearMethod(LinearMethodBase):
        def __init__(self, serialized: bool) -> None:
            self.serialized = serialized

        def create_weights(
            self,
            layer: torch.nn.Module,
            input_size_per_partition: int,
            output_partition_sizes: list[int],
            input_size: int,
            output_size: int,
            params_dtype: torch.dtype,
            weight_loader: Callable[..., None] | None = None,
            **_: Any,
        ) -> None:
            def create(name: str, dtype: torch.dtype, **dims: int) -> None:
                shape = (sum(output_partition_sizes), input_size_per_partition)[: len(dims)]
                parameter = Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
                set_weight_attrs(parameter, {**dims, "weight_loader": weight_loader})
                layer.register_parameter(name, parameter)

            dtype = torch.int8 if self.serialized else params_dtype
            create("weight", dtype, output_dim=0, input_dim=1)
            if self.serialized:
                create("weight_scale", torch.float32, output_dim=0)

        def process_weights_after_loading(self, layer: Any) -> None:
            if self.serialized:
                weight, scale = layer.weight.data, layer.weight_scale.data
                del layer.weight_scale
            else:
                weight, scale = quantize(layer.weight.data)
            layer.weight = Parameter(weight.t().contiguous(), requires_grad=False)
            layer.largest_scale = scale.max().item()
            layer.scale_ratios = scale / layer.largest_scale

        def apply(
            self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            y = (x.float() @ layer.weight.float()) * layer.scale_ratios * layer.largest_scale
            return (y if bias is None else y + bias).to(x.dtype)

    class ToyConfig(QuantizationConfig):
        def __init__(self, serialized: bool = False) -> None:
            super().__init__()
            self.serialized = serialized

        def get_name(self) -> str:
            return NAME

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float32]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> ToyConfig:
            return cls(serialized=True)

        def get_quant_method(
            self, layer: torch.nn.Module, prefix: str
        ) -> QuantizeMethodBase | None:
            return ToyLinearMethod(self.serialized) if isinstance(layer, LinearBase) else None

        def get_scaled_act_names(self) -> list[str]:
            return []

    quantization.QUANTIZATION_METHODS[NAME] = ToyConfig
    # SGLang looks here on a CPU with AMX
    quantization.CPU_QUANTIZATION_METHODS[NAME] = ToyConfig
    add_quantization_method_choices([NAME])

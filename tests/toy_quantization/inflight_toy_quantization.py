"""A test plugin for SGLang: a quantization that leaves nothing of a checkpoint's layout.

Linear layers and experts hold int8 with a scale for each output. Finishing turns the weight, puts
it into a new parameter without a loader, and splits the scales into a tensor of ratios and a Python
float, their largest. It keeps no scale. A checkpoint has int8 and scales, or, with
``--quantization toy`` alone, unquantized weights. One with int8 may have scales for KV, for
SGLang's own method.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter

NAME = "toy"
LARGEST = 127
EXPERTS = ("w13_weight", "w2_weight")


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``weight`` [..., out, in] as int8 of its shape, and a float32 scale [..., out, 1]."""
    scale = weight.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-6) / LARGEST
    return (weight.float() / scale).round().to(torch.int8), scale


def finish(layer: torch.nn.Module, weight_name: str) -> None:
    """Replace a parameter [..., out, in], quantized or not, by its final form [..., in, out]."""
    weight = layer.get_parameter(weight_name).data
    if weight.dtype == torch.int8:
        scale = layer.get_parameter(f"{weight_name}_scale").data
        delattr(layer, f"{weight_name}_scale")
    else:
        weight, scale = quantize(weight)
    turned = weight.transpose(-1, -2).contiguous()
    setattr(layer, weight_name, Parameter(turned, requires_grad=False))
    largest = scale.max().item()
    setattr(layer, f"{weight_name}_largest_scale", largest)
    setattr(layer, f"{weight_name}_scale_ratios", scale.transpose(-1, -2) / largest)


def dequantize(layer: Any, weight_name: str) -> torch.Tensor:
    """Return a finished weight [..., in, out] in float32."""
    weight: torch.Tensor = getattr(layer, weight_name).float()
    ratios: torch.Tensor = getattr(layer, f"{weight_name}_scale_ratios")
    largest: float = getattr(layer, f"{weight_name}_largest_scale")
    return weight * ratios * largest


def install() -> None:
    from sglang.srt.arg_groups.choices import add_quantization_method_choices
    from sglang.srt.layers import quantization
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from sglang.srt.layers.quantization.base_config import (
        FusedMoEMethodBase,
        LinearMethodBase,
        QuantizationConfig,
        QuantizeMethodBase,
    )
    from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.utils import set_weight_attrs

    def create(
        layer: torch.nn.Module,
        name: str,
        shape: tuple[int, ...],
        attributes: dict[str, Any],
        unquantized: torch.dtype | None,
    ) -> None:
        weight = Parameter(torch.empty(shape, dtype=unquantized or torch.int8), requires_grad=False)
        set_weight_attrs(weight, attributes)
        layer.register_parameter(name, weight)
        if unquantized is None:
            scale = Parameter(torch.empty(*shape[:-1], 1, dtype=torch.float32), requires_grad=False)
            # a scale has no inputs to be shared out among ranks
            shared = {name: value for name, value in attributes.items() if name != "input_dim"}
            set_weight_attrs(scale, {**shared, "quant_method": "channel"})
            layer.register_parameter(f"{name}_scale", scale)

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
            **attributes: Any,
        ) -> None:
            shape = (sum(output_partition_sizes), input_size_per_partition)
            attributes = {
                "output_dim": 0,
                "input_dim": 1,
                "weight_loader": attributes["weight_loader"],
            }
            create(layer, "weight", shape, attributes, None if self.serialized else params_dtype)

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            finish(layer, "weight")

        def apply(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            y = x.float() @ dequantize(layer, "weight")
            return (y if bias is None else y + bias).to(x.dtype)

    class ToyMoEMethod(FusedMoEMethodBase):
        def __init__(self, serialized: bool) -> None:
            self.serialized = serialized

        def create_weights(
            self,
            layer: torch.nn.Module,
            num_experts: int,
            hidden_size: int,
            intermediate_size_per_partition: int,
            params_dtype: torch.dtype,
            **attributes: Any,
        ) -> None:
            inner = intermediate_size_per_partition
            dtype = None if self.serialized else params_dtype
            create(layer, "w13_weight", (num_experts, 2 * inner, hidden_size), attributes, dtype)
            create(layer, "w2_weight", (num_experts, hidden_size, inner), attributes, dtype)

        def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
            """Create nothing: ``apply`` needs no runner."""

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            for name in EXPERTS:
                finish(layer, name)

        def apply(  # type: ignore[override]
            self, layer: torch.nn.Module, dispatch_output: Any
        ) -> StandardCombineInput:
            x = dispatch_output.hidden_states
            weights, chosen, _ = dispatch_output.topk_output
            w13, w2 = (dequantize(layer, name) for name in EXPERTS)
            gate, up = torch.einsum("ti,eio->teo", x.float(), w13).chunk(2, dim=-1)
            y = torch.einsum("tei,eio->teo", torch.nn.functional.silu(gate) * up, w2)
            shares = x.new_zeros(len(x), len(w2), dtype=torch.float32)
            shares.scatter_(1, chosen.long(), weights.float())
            return StandardCombineInput(torch.einsum("teo,te->to", y, shares).to(x.dtype))

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
            if isinstance(layer, FusedMoE):
                return ToyMoEMethod(self.serialized)
            if isinstance(layer, RadixAttention):
                return BaseKVCacheMethod(self) if self.serialized else None
            return ToyLinearMethod(self.serialized) if isinstance(layer, LinearBase) else None

        def get_scaled_act_names(self) -> list[str]:
            return []

    quantization.QUANTIZATION_METHODS[NAME] = ToyConfig
    # SGLang looks here on a CPU with AMX
    quantization.CPU_QUANTIZATION_METHODS[NAME] = ToyConfig
    add_quantization_method_choices([NAME])

"""A test plugin for SGLang: torch in place of the kernels that multiply by quantized weights.

They serve block-wise FP8, FP8 with a scale for each tensor, and int8 with a scale for each output.
SGLang's own loading and finishing are untouched. Activations stay as they are, not quantized.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    from sglang.srt.layers.quantization import fp8, fp8_utils, w8a8_int8

    fp8_utils.triton_w8a8_block_fp8_linear = _multiply_blocks  # type: ignore[assignment]
    fp8.apply_fp8_linear = _multiply_whole  # type: ignore[assignment]
    w8a8_int8.per_token_quant_int8 = _do_not_quantize  # type: ignore[assignment]
    # SGLang has it on CUDA alone
    w8a8_int8.int8_scaled_mm = _multiply_channels


def _multiply_blocks(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: None = None,
    bias: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Multiply by ``weight`` [out, in], with a scale for each block of ``block_size``."""
    rows, columns = block_size
    scale = weight_scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    whole = weight.float() * scale[: weight.shape[0], : weight.shape[1]]
    return _multiply(input, whole.t(), bias)


def _multiply_whole(
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Multiply by ``weight`` [in, out], with one scale."""
    return _multiply(input, weight.float() * weight_scale, bias)


def _do_not_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x.new_ones(*x.shape[:-1], 1)


def _multiply_channels(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply by ``weight`` [in, out], with a scale [out, 1]."""
    return _multiply(x, weight.float() * weight_scale.t(), bias)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.float() @ weight
    return (y if bias is None else y + bias).to(x.dtype)

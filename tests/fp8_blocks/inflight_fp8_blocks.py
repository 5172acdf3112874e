"""A test plugin for SGLang: its layers of FP8 in blocks, computed by torch.

SGLang's own kernels for them need a GPU, or a CPU with AMX. Its layers, loaders and checks run as
they are. A finished layer holds its tensors as they were loaded.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    from sglang.srt.layers.quantization import fp8

    def finish(self: Any, layer: Any) -> None:
        pass

    def apply(
        self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, columns = self.weight_block_size
        scale = layer.weight_scale_inv.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        y = torch.nn.functional.linear(x.float(), layer.weight.float() * scale)
        return (y if bias is None else y + bias).to(x.dtype)

    def choose_no_kernel(**_: Any) -> None:
        pass

    module: Any = fp8
    module.Fp8LinearMethod.process_weights_after_loading = finish
    module.Fp8LinearMethod.apply = apply
    module.dispatch_w8a8_block_fp8_linear = choose_no_kernel

"""A test plugin for SGLang: expert parallelism without a GPU.

A token for another rank's expert has -1 as the expert's number. GPU kernels skip -1, but SGLang's
torch implementation does not know it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def install() -> None:
    from sglang.srt.layers.moe import fused_moe_native

    def pass_over_other_ranks(
        layer: torch.nn.Module, x: torch.Tensor, topk_output: Any, config: object
    ) -> torch.Tensor:
        weights, experts, logits = topk_output
        elsewhere = experts < 0
        # any expert of this rank, with weight 0
        own = (weights.masked_fill(elsewhere, 0), experts.clamp_min(0), logits)
        dispatched: Any = SimpleNamespace(hidden_states=x, topk_output=own)
        out: torch.Tensor = fused_moe_native.fused_moe_forward_native(
            layer, dispatched
        ).hidden_states
        return out

    fused_moe_native.moe_forward_native = pass_over_other_ranks

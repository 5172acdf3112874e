"""Flags of a layer's method about the layout of its weights after loading."""

from __future__ import annotations

from typing import Protocol

from sglang_inflight.sglang_types.describes import describes

_UNQUANT = "sglang.srt.layers.quantization.unquant"


@describes(f"{_UNQUANT}.UnquantizedFusedMoEMethod")
class FusedMoEMethod(Protocol):
    """Attributes read by name, because other layers' methods do not have them."""

    use_flashinfer_trtllm_moe: bool
    w13_swiglu_interleaved: bool

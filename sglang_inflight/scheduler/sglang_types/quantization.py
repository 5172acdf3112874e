"""What a layer's method made of its weights after loading."""

from __future__ import annotations

from typing import Protocol

from sglang_inflight.sglang_types.describes import describes

_UNQUANT = "sglang.srt.layers.quantization.unquant"


@describes(f"{_UNQUANT}.UnquantizedFusedMoEMethod")
class FusedMoEMethod(Protocol):
    """Read by name, because the methods of other layers have none of it."""

    use_flashinfer_trtllm_moe: bool
    w13_swiglu_interleaved: bool

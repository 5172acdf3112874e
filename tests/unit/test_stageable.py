"""Models and servers with unstageable weights, recognised by SGLang's own classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationStrategy
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsLinearMethod,
)
from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_fp8 import (
    CompressedTensorsW8A8Fp8,
)
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM
from sglang.srt.models.inkling_common.dense_mlp import _InklingUnquantizedFusedMoEMethod
from sglang.srt.models.kimi_vl import KimiVLForConditionalGeneration
from torch import nn

from sglang_inflight.scheduler.update.checks.stageable import why_not_loaded, why_not_shadowed

try:
    from sglang.srt.models.beam import BeamUnquantizedFusedMoEMethod
except ImportError:  # not in 0.5.22
    BeamUnquantizedFusedMoEMethod = UnquantizedFusedMoEMethod  # type: ignore[assignment, misc]


def make_bare(kind: type, **attributes: Any) -> Any:
    """Return an object of ``kind`` with its attributes after loading, without a server."""
    made: Any = object.__new__(kind)
    if issubclass(kind, nn.Module):
        nn.Module.__init__(made)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def model_with(**attributes: Any) -> nn.Module:
    return nn.Sequential(make_bare(nn.Linear, **attributes))


def moe_method(kind: type = UnquantizedFusedMoEMethod, **flags: bool) -> Any:
    flags = {"use_flashinfer_trtllm_moe": False, "w13_swiglu_interleaved": False} | flags
    return make_bare(kind, **flags)


@pytest.mark.parametrize(
    "method",
    [
        None,
        make_bare(UnquantizedLinearMethod),
        make_bare(UnquantizedEmbeddingMethod),
        moe_method(),
        moe_method(BeamUnquantizedFusedMoEMethod),
    ],
    ids=lambda method: type(method).__name__,
)
def test_unprocessed_weights_are_stageable(method: Any) -> None:
    assert why_not_shadowed(model_with(quant_method=method)) is None


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (make_bare(Fp8LinearMethod), "0 (Linear) is quantized by Fp8LinearMethod"),
        (moe_method(use_flashinfer_trtllm_moe=True), "--moe-runner-backend flashinfer_trtllm"),
        (moe_method(w13_swiglu_interleaved=True), "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"),
        (
            moe_method(_InklingUnquantizedFusedMoEMethod),
            "changes its weights after loading (_InklingUnquantizedFusedMoEMethod)",
        ),
    ],
    ids=["fp8", "trtllm", "interleaved", "inkling"],
)
def test_processed_weights_are_not_stageable(method: Any, reason: str) -> None:
    assert reason in (why_not_shadowed(model_with(quant_method=method)) or "")


def test_processed_weights_can_be_loaded_in_place() -> None:
    assert why_not_loaded(model_with(quant_method=make_bare(Fp8LinearMethod))) is None
    assert why_not_loaded(make_bare(DeepseekV2ForCausalLM)) is None
    packed = model_with(use_intel_amx_backend=True)
    assert "is packed for AMX" in (why_not_loaded(packed) or "")


def test_wrapper_of_a_deriving_model_is_not_stageable() -> None:
    wrapper = make_bare(KimiVLForConditionalGeneration)
    assert why_not_shadowed(wrapper) is None
    wrapper.language_model = make_bare(DeepseekV2ForCausalLM)
    assert why_not_shadowed(wrapper) == (
        "language_model (DeepseekV2ForCausalLM) derives further weights after loading"
    )


def fp8_layer() -> Any:
    """Return a new linear layer of GLM-4.5-Air-FP8."""
    scheme: Any = make_bare(CompressedTensorsW8A8Fp8)
    scheme.strategy = QuantizationStrategy.CHANNEL
    scheme.is_static_input_scheme, scheme.weight_block_size = False, None
    layer = make_bare(
        nn.Module, quant_method=make_bare(CompressedTensorsLinearMethod), scheme=scheme
    )
    scheme.create_weights(
        layer, 16, [8, 8], 16, 16, torch.bfloat16, weight_loader=lambda *args, **kwargs: None
    )
    return layer


def test_deleted_source_of_derived_weights_refuses_updates() -> None:
    """MiniCPM3's loader would fail at that tensor, after writing others in place."""
    deleted = model_with(w_kc=torch.ones(1))
    assert "has deleted kv_b_proj" in (why_not_loaded(deleted) or "")
    assert why_not_loaded(model_with(w_kc=torch.ones(1), kv_b_proj=nn.Identity())) is None


def test_weight_loadable_once_is_refused() -> None:
    layer = fp8_layer()
    model = nn.Sequential(layer)
    assert why_not_loaded(model) is None
    layer.scheme.process_weights_after_loading(layer)
    assert why_not_loaded(model) == (
        "0 (Module) is quantized by CompressedTensorsLinearMethod, which loads 'weight' once: it "
        "then replaces the parameter by one without a weight_loader"
    )


def test_restorable_weight_can_be_loaded() -> None:
    layer = fp8_layer()
    layer.scheme.process_weights_after_loading(layer)

    class Restoring(CompressedTensorsLinearMethod):
        def restore_weights_before_loading(self, layer: nn.Module) -> None:
            raise NotImplementedError

    layer.quant_method = make_bare(Restoring)
    assert why_not_loaded(nn.Sequential(layer)) is None


def test_replaced_loader_is_not_stageable() -> None:
    model = nn.Sequential()
    assert why_not_shadowed(model) is None
    model.load_weights = lambda weights: None  # type: ignore[assignment]
    assert "has had its loader replaced" in (why_not_shadowed(model) or "")


def test_sglangs_weight_caches_are_not_stageable() -> None:
    reason = "Online weight updates are not supported with a cache of mine."
    assert why_not_shadowed(model_with(_derived_weight_cache_error=reason)) == reason
    split = why_not_shadowed(model_with(_hc_attn_tf32_parts=(1,))) or ""
    assert "SGLANG_OPT_DEEPGEMM_HC_PRENORM=0" in split

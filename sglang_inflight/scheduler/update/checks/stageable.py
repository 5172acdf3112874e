"""Finds models that cannot be staged, or cannot be loaded a second time.

A shadow holds the tensors written by a loader. SGLang may finish a model after loading: another
layout, a product of two weights, or a copy in another precision. A commit would leave these
results outdated. Such a model is loaded again in place, and finished again (``in_place.py``). A
model is refused if its finishing cannot be repeated. ``forward_caches.py`` finds what serving has
made of weights.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsFusedMoEMethod,
)
from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_scheme import (
    CompressedTensorsMoEScheme,
)
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.model_executor.model_runner_components.weight_updater import (
    _unsupported_derived_weight_cache_error,
)
from sglang.srt.utils import is_npu
from torch import nn

from sglang_inflight.scheduler.update.attributes import modules_of
from sglang_inflight.scheduler.update.rate import paced

# The flags checked below show what these methods did after loading.
_KNOWN_FINISHES = {
    QuantizeMethodBase.process_weights_after_loading,
    UnquantizedLinearMethod.process_weights_after_loading,
    UnquantizedFusedMoEMethod.process_weights_after_loading,
}
# The base classes' methods, and one that defers to the layer's scheme.
_RESTORES_NOTHING = {
    QuantizeMethodBase.restore_weights_before_loading,
    CompressedTensorsFusedMoEMethod.restore_weights_before_loading,
    CompressedTensorsMoEScheme.restore_weights_before_loading,
}
_UNQUANTIZED = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod, UnquantizedFusedMoEMethod)

# The projection from which latent attention derives w_kc and w_vc. MiniCPM3 deletes it.
_SOURCE = "kv_b_proj"

# Names of quantized layers' weights in a checkpoint.
_QUANTIZED_WEIGHTS = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "w13_", "w2_")
    for name in ("weight", "qweight", "weight_packed")
)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's forwards. Some weights may be kept on the host."""
    devices = (parameter.device for parameter in model.parameters())
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def why_not_loaded(model: nn.Module) -> str | None:
    """Return why ``model`` cannot be loaded again at all, or None if it can."""
    for name, module in paced(modules_of(model)):
        if module.__dict__.get("use_intel_amx_backend", False):
            return f"{_called(name, module)} is packed for AMX after loading"
        if _is_made_from_a_deleted_weight(module):
            return (
                f"{_called(name, module)} has deleted {_SOURCE} after deriving weights from it, so "
                "its loader finds no place for that tensor"
            )
        if (weight := _lost_its_loader(module)) is not None:
            return (
                f"{_called(name, module)} is quantized by {type(module.quant_method).__name__}, "
                f"which loads {weight!r} once: it then replaces the parameter by one without a "
                "weight_loader"
            )
    return why_stale(model)


def _is_made_from_a_deleted_weight(module: nn.Module) -> bool:
    return module.__dict__.get("w_kc") is not None and not hasattr(module, _SOURCE)


def why_stale(model: nn.Module) -> str | None:
    """Return SGLang's reason why a cache derived from weights would go stale, or None."""
    cached: str | None = _unsupported_derived_weight_cache_error(model)
    return cached


def why_not_shadowed(model: nn.Module) -> str | None:
    """Return why ``model`` cannot be staged, or None if it can."""
    if torch.version.hip is not None:
        return "ROCm kernels may shuffle weights after loading"
    if is_npu():
        return "NPU kernels may change the layout of weights after loading"
    for name, module in paced(modules_of(model)):
        if (reason := _why_not_module(module)) is not None:
            return f"{_called(name, module)} {reason}"
    return why_not_loaded(model)


def why_laid_out_anew(model: nn.Module) -> str | None:
    """Return why parameters hold other data than a checkpoint's tensors, or None if none do."""
    for name, module in modules_of(model):
        method = _method_of(module)
        if method is not None and (reason := _why_not_method(method)) is not None:
            return f"{_called(name, module)} {reason}"
    return None


def _lost_its_loader(module: nn.Module) -> str | None:
    """Return the name of a quantized weight replaced for good after loading, or None."""
    method = _method_of(module)
    if not isinstance(method, QuantizeMethodBase) or isinstance(method, _UNQUANTIZED):
        return None
    if _can_restore(method) or _can_restore(getattr(module, "scheme", None)):
        return None
    for name in _QUANTIZED_WEIGHTS & module._parameters.keys():
        weight = module._parameters[name]
        if weight is not None and getattr(weight, "weight_loader", None) is None:
            return name
    return None


def _can_restore(method: object) -> bool:
    """Return whether ``method`` can restore the parameters for a loader."""
    own = getattr(type(method), "restore_weights_before_loading", None)
    return own is not None and own not in _RESTORES_NOTHING


def _method_of(module: nn.Module) -> object | None:
    """Return ``module.quant_method``. Most modules have none, and PyTorch is slow to say so."""
    if (method := module.__dict__.get("quant_method")) is not None:
        return method
    has = hasattr(type(module), "quant_method") or "quant_method" in module._modules
    return getattr(module, "quant_method", None) if has else None


def _called(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def _why_not_module(module: nn.Module) -> str | None:
    # also on a wrapper's inner model: the wrapper's loader calls it
    if hasattr(type(module), "post_load_weights") or "post_load_weights" in module.__dict__:
        return "derives further weights after loading"
    if "load_weights" in module.__dict__:
        return "has had its loader replaced by one that may write the live weights"
    method = _method_of(module)
    return None if method is None else _why_not_method(method)


def _why_not_method(method: object) -> str | None:
    kind = type(method).__name__
    if not isinstance(method, _UNQUANTIZED):
        return f"is quantized by {kind}"
    if type(method).process_weights_after_loading not in _KNOWN_FINISHES:
        return f"changes its weights after loading ({kind})"
    if getattr(method, "use_flashinfer_trtllm_moe", False):
        return (
            "holds its experts in the layout of --moe-runner-backend flashinfer_trtllm: choose "
            "another backend"
        )
    if getattr(method, "w13_swiglu_interleaved", False):
        return (
            "holds its experts' gate and up interleaved: unset SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"
        )
    return None

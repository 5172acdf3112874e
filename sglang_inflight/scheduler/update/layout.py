"""Tells servers apart whose ranks hold tensors in different layouts.

Two servers of one layout may exchange the bytes of their tensors. Names, shapes and dtypes do not
prove that: SGLang's finishing permutes some weights within their shape, by backend and device. So
the layout also has every module's class, and its method of quantization with the method's switches.
It has the model's configuration, too: another RoPE makes another model of the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import sglang
import torch

from sglang_inflight.scheduler.update.attributes import methods_of
from sglang_inflight.scheduler.update.finished.places import modules_of
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel
from sglang_inflight.sglang_types import get_parallel

if TYPE_CHECKING:
    from torch import nn

_SIZES = (
    "tp_size",
    "pp_size",
    "ep_size",
    "moe_dp_size",
    "moe_dense_tp_size",
    "attn_cp_size",
    "attn_dp_size",
    "enable_dp_attention",
)
_BACKENDS = (
    "bf16_gemm_backend",
    "fp8_gemm_runner_backend",
    "fp4_gemm_runner_backend",
    "moe_runner_backend",
    "moe_a2a_backend",
    "speculative_moe_runner_backend",
    "speculative_moe_a2a_backend",
)
_DIGITS = 16


def find_layout(
    models: Sequence[ShadowedModel], device: torch.device, server_args: Any
) -> dict[str, str]:
    """Return this rank's layout, by fact. Call before the first forward: methods may change."""
    parallel = get_parallel()
    found = {"sglang": sglang.__version__, "device": _name_device(device)}
    found |= {name: str(getattr(parallel, name, None)) for name in _SIZES}
    found |= {name: str(getattr(server_args, name, None)) for name in _BACKENDS}
    for model in models:
        config, role = model.runner.model_config, model.role
        architectures = config.hf_config.architectures or [type(model.runner.model).__name__]
        found[f"{role} architecture"] = ", ".join(architectures)
        found[f"{role} dtype"] = str(config.dtype)
        found[f"{role} quantization"] = str(config.quantization)
        found[f"{role} modules"] = _describe_modules(model.runner.model)
        if model.findings.configuration is not None:
            facts = model.findings.configuration.facts()
            found |= {f"{role} {name}": value for name, value in facts.items()}
    return found


def name_layout(layout: dict[str, str]) -> str:
    """Return 16 hex digits, equal for equal layouts."""
    lines = "".join(f"{name} {layout[name]}\n" for name in sorted(layout))
    return hashlib.sha256(lines.encode()).hexdigest()[:_DIGITS]


def _name_device(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda {major}.{minor}"


def _describe_modules(model: nn.Module) -> str:
    whole = hashlib.sha256()
    for path, module in sorted(modules_of(model), key=lambda pair: pair[0]):
        whole.update(f"{path} {_class_of(module)}\n".encode())
        for name, method in methods_of(module):
            switches = {key: value for key, value in vars(method).items() if type(value) is bool}
            whole.update(f"{name} {_class_of(method)} {sorted(switches.items())}\n".encode())
    return whole.hexdigest()[:_DIGITS]


def _class_of(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"

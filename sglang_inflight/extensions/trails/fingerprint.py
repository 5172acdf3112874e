"""Fingerprints of servers: code, device and arguments, on which their numbers depend."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.model_override_base import resolved_view

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import Scheduler

# arguments that choose kernels, formats, splits or batches
_ARGUMENTS = (
    "attention_backend",
    "attn_cp_size",
    "attn_dp_size",
    "chunked_prefill_size",
    "context_length",
    "decode_attention_backend",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "dtype",
    "enable_deterministic_inference",
    "enable_lora",
    "enable_mixed_chunk",
    "ep_size",
    "kv_cache_dtype",
    "moe_runner_backend",
    "page_size",
    "prefill_attention_backend",
    "quantization",
    "random_seed",
    "rl_on_policy_target",
    "sampling_backend",
    "tp_size",
)
# environment variables that choose what log probabilities mean
_ENVIRONMENT = ("SGLANG_RETURN_ORIGINAL_LOGPROB",)


def fingerprint(scheduler: Scheduler) -> dict[str, Any]:
    """Return versions, the device's name, and the arguments that the server was started with.

    ``attention`` is SGLang's choice of a backend.
    """
    # the arguments keep what was given; what SGLang makes of them is in the view
    given: Any = scheduler.server_args
    default: Any = type(given)(model_path="")
    return {
        "sglang": version("sglang"),
        "sglang_inflight": version("sglang-inflight"),
        "torch": torch.__version__,
        "device": _device_name(scheduler.device),
        "attention": resolved_view(given).attention_backend,
        "arguments": {
            name: value
            for name in _ARGUMENTS
            if (value := getattr(given, name)) != getattr(default, name)
        },
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }


def _device_name(device: str) -> str:
    if device == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return f"{device} {torch.get_device_module(device).get_device_name()}"

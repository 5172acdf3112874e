"""The reference platform: the real SGLang server on a CPU, with torch kernels only.

SGLang's own CPU engine needs compiled kernels that its wheel does not carry. This
out-of-tree platform (entry-point group ``sglang.srt.platforms``) asks for the
``torch_native`` attention backend and for no compiled kernel, so that scheduler, radix
cache, tensor and data parallelism run anywhere. It is for development, tests and the
demo, and it steps aside wherever something better is there.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_inflight.reference.lora import serve_adapters_without_pinning

THREADS_BIND = "SGLANG_CPU_OMP_THREADS_BIND"
# oneDNN's, and that of torch's layer above it, which keeps what oneDNN's lets go
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
# enough for decode batches, which come again and again
KERNELS = 64


def activate() -> str | None:
    """Name the platform class, or None where an accelerator or a user's choice decides.

    ``SGLANG_USE_CPU_ENGINE=1`` is the user's choice of SGLang's own CPU engine.
    ``SGLANG_PLATFORM`` needs no check: SGLang then activates only the platform named.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or _has_accelerator():
        return None
    return f"{__name__}:ReferencePlatform"


def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


class ReferencePlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang on ``torch.device("cpu")`` with torch's kernels and gloo's collectives."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_device(self, device_id: int = 0) -> str:
        # upstream's CPU mixin gives a torch.device, its argument resolution splits a string
        return "cpu"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def post_load_model(self, model: torch.nn.Module) -> None:
        serve_adapters_without_pinning()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Share the cores out among the ranks, and bound the memory of torch's kernels.

        Both unless the user did. SGLang otherwise gives each rank a NUMA node of its own,
        and stops where there are more ranks than nodes. ``"0|1"`` means rank 0 on core 0,
        rank 1 on core 1. A kernel of up to a MiB is kept for each shape of a matmul, by
        default 1024 of them, and nearly every prefill has a shape of its own.
        """
        for cache in KERNEL_CACHES:
            os.environ.setdefault(cache, str(KERNELS))
        replicas = 1 if server_args.enable_dp_attention else server_args.dp_size
        ranks = server_args.tp_size * server_args.pp_size * replicas
        if ranks > 1 and THREADS_BIND not in os.environ:
            os.environ[THREADS_BIND] = _share_cores(ranks)


def _share_cores(ranks: int) -> str:
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    return "|".join(
        ",".join(str(cores[(rank * share + i) % len(cores)]) for i in range(share))
        for rank in range(ranks)
    )

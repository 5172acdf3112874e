"""Dtype and threads suited to torch's kernels on this CPU.

The choice reads the CPU's features and measures nothing, so all processes agree under any load.
"""

from __future__ import annotations

import os
import platform
from typing import Literal, NamedTuple

import torch

DType = Literal["bfloat16", "float32"]

# oneDNN runs torch's bfloat16 matmuls; these variables cap its instruction set
_ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
# oneDNN accepts bfloat16 at these caps, but computes it in float32
_ISAS_WITHOUT_BFLOAT16 = ("AVX512_CORE", "AVX512_CORE_VNNI")

# weights of a matrix per thread: below this, waking another thread costs more than it saves
WEIGHTS_A_THREAD = 1 << 20


class Choice(NamedTuple):
    dtype: DType
    why: str


def fast_dtype() -> Choice:
    """Return bfloat16 if the CPU and torch compute in it, else float32.

    Emulated bfloat16 is several times slower than float32, and a hundred times in training.
    """
    limit = next((name for name in _ISA_LIMITS if os.environ.get(name)), None)
    if not _has_bfloat16_instructions():
        return Choice("float32", "this CPU has no instructions for bfloat16")
    if limit is not None and (
        os.environ[limit].upper() in _ISAS_WITHOUT_BFLOAT16 or not _takes_bfloat16()
    ):
        return Choice(
            "float32", f"{limit}={os.environ[limit]} forbids the CPU's instructions for bfloat16"
        )
    if not _takes_bfloat16():
        return Choice("float32", "torch has no kernels for bfloat16 on this CPU")
    return Choice("bfloat16", "this CPU has instructions for it")


def _has_bfloat16_instructions() -> bool:
    if platform.machine().lower() in ("x86_64", "amd64"):
        # every form of AMX includes bfloat16
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return _takes_bfloat16()


def _takes_bfloat16() -> bool:
    """Return whether oneDNN accepts bfloat16 under its cap."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def threads_for(weights: int, cores: int) -> int:
    """Return the number of threads for matrices of ``weights`` weights.

    Threads synchronize at each matrix.
    """
    return max(1, min(cores, weights // WEIGHTS_A_THREAD))

"""What torch's kernels do well on this CPU. Measured nowhere, asked for: so it is the same
each time, in each process, however busy the machine is."""

from __future__ import annotations

import os
import platform
from typing import Literal, NamedTuple

import torch

DType = Literal["bfloat16", "float32"]

# oneDNN, which has torch's matmuls in bfloat16, stays below the instructions named here
_ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
# of these oneDNN takes bfloat16, and computes it as float32
_ISAS_WITHOUT_BFLOAT16 = ("AVX512_CORE", "AVX512_CORE_VNNI")

# weights of a matrix for which waking one more thread pays, when few tokens are decoded
WEIGHTS_A_THREAD = 1 << 20


class Choice(NamedTuple):
    dtype: DType
    why: str


def fast_dtype() -> Choice:
    """bfloat16 where the CPU computes in it and torch may. Elsewhere float32 is several times
    as fast, and in training a hundred times."""
    limit = next((name for name in _ISA_LIMITS if os.environ.get(name)), None)
    if not _has_bfloat16_instructions():
        return Choice("float32", "this CPU has no instructions for bfloat16")
    if limit is not None and (
        os.environ[limit].upper() in _ISAS_WITHOUT_BFLOAT16 or not _takes_bfloat16()
    ):
        return Choice("float32", f"{limit}={os.environ[limit]} forbids those for bfloat16")
    if not _takes_bfloat16():
        return Choice("float32", "torch has no kernels for bfloat16 on this CPU")
    return Choice("bfloat16", "this CPU has instructions for it")


def _has_bfloat16_instructions() -> bool:
    if platform.machine().lower() in ("x86_64", "amd64"):
        # AMX in any of its forms has bfloat16
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return _takes_bfloat16()


def _takes_bfloat16() -> bool:
    """What oneDNN says, its limits included."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def threads_for(weights: int, cores: int) -> int:
    """How many of ``cores`` work on a matrix of so many weights. They meet at each matrix."""
    return max(1, min(cores, weights // WEIGHTS_A_THREAD))

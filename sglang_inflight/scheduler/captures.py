"""Captures CUDA graphs beside other threads.

SGLang captures some graphs when a request first needs them: of vision towers
(``SGLANG_VIT_ENABLE_CUDA_GRAPH``), and of DeepSeek-V4's last layers. In torch's default mode a
capture forbids CUDA calls to every thread of the process: an allocation by the staging thread fails
and breaks the capture, and the scheduler ends.

This module hooks the constructors of ``torch.cuda.graph`` and ``BreakableCUDAGraphCapture``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_inflight.hooking import AROUND, hook

# the mode's place among the arguments of both kinds of captures
_MODE = 3


@hook("torch.cuda.graphs.graph.__init__", AROUND)
@hook(
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
    ".BreakableCUDAGraphCapture.__init__",
    AROUND,
)
def capture_beside_other_threads(
    original: Callable[..., None], capture: Any, *args: Any, **kwargs: Any
) -> None:
    """Forbid CUDA calls to the capturing thread alone, unless the caller chose a mode."""
    if len(args) <= _MODE:
        kwargs.setdefault("capture_error_mode", "thread_local")
    original(capture, *args, **kwargs)

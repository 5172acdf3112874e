"""Marks elements without contents, and finds NaN.

Several updates may fill weights without contents, in place. So these are filled with a bit pattern
that no trainer sends: a NaN with a payload. An element with this pattern was not written.
"""

from __future__ import annotations

import math

import torch

from sglang_inflight.vocabulary.errors import Refused

_PATTERNS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF8_0A5A_A5A5_0A5A),
    torch.float32: (torch.int32, 0x7FCA_5A5B),
    torch.bfloat16: (torch.int16, 0x7FDB),
    torch.float16: (torch.int16, 0x7E5B),
}


def can_mark(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _PATTERNS


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a floating-point ``tensor`` holds neither NaN nor infinity."""
    return math.isfinite(largest_magnitude(tensor))


def largest_magnitude(tensor: torch.Tensor) -> float:
    """Return the largest magnitude in a floating-point ``tensor``, NaN if it holds one."""
    if tensor.numel() == 0:
        return 0.0
    # one pass without extra memory: NaN and infinity show in the minimum or the maximum
    low, high = torch.aminmax(tensor)
    # one read for both: each read waits for the device
    ends: list[float] = torch.stack((low, high)).tolist()
    return max(map(abs, ends))


def mark(tensor: torch.Tensor) -> None:
    """Fill ``tensor`` with the pattern."""
    bits, pattern = _PATTERNS[tensor.dtype]
    tensor.view(bits).fill_(pattern)


def count_marked(tensor: torch.Tensor) -> int:
    """Return how many elements of ``tensor`` were not written since ``mark``."""
    if is_finite(tensor):
        return 0
    return int(marks_in(tensor).sum())


def holds_stray(new: torch.Tensor, served: torch.Tensor) -> bool:
    """Return whether ``new`` holds NaN where ``served`` has none."""
    if not can_mark(new) or is_finite(new):
        return False
    return bool((new.isnan() & ~served.to(new.device).isnan()).any())


def stray_refusal(name: str) -> Refused:
    return Refused(
        f"loading the update leaves NaN in {name!r}, which no tensor brings: the model's loader, "
        "or its finishing, computes it"
    )


def marks_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return a boolean for each element: True if it was not written since ``mark``."""
    bits, pattern = _PATTERNS[tensor.dtype]
    return tensor.view(bits) == pattern

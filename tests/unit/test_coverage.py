"""Checks of each received tensor, on the staging thread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from sglang_inflight.scheduler.update.checks.coverage import is_finite

NAN, INF = float("nan"), float("inf")


class Reads(TorchFunctionMode):
    """Counts calls that wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += getattr(func, "__name__", "") in ("item", "tolist", "cpu", "__bool__")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([], True),
        ([0.0, -1.0], True),
        ([NAN, 1.0], False),
        ([1.0, NAN], False),
        ([INF, 1.0], False),
        ([1.0, -INF], False),
        ([INF, -INF], False),
    ],
)
def test_nan_and_inf_are_found(content: list[float], expected: bool, dtype: torch.dtype) -> None:
    assert is_finite(torch.tensor(content, dtype=dtype)) is expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_largest_values_of_a_dtype_are_finite(dtype: torch.dtype) -> None:
    ends = torch.finfo(dtype)
    assert is_finite(torch.tensor([ends.min, ends.max], dtype=dtype))


def test_finite_check_waits_for_device_once() -> None:
    with Reads() as reads:
        assert is_finite(torch.ones(4))
    assert reads.count == 1

"""Swaps of contents, like on a device, in a CPU's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_inflight.scheduler.update.swap import ContentSwap
from sglang_inflight.vocabulary.errors import Unproven

SPARE_BYTES = 64
# operations allowed to a commit: views and copies
ALLOWED = {"as_strided", "copy_", "detach", "slice", "view"}


class Operations(TorchDispatchMode):
    """Records the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


WEIGHTS = {
    "smaller than the spare piece": torch.arange(5),
    "many pieces, the last one not whole": torch.arange(101),
    "bfloat16": torch.arange(77).to(torch.bfloat16),
    "one byte each": torch.arange(100, dtype=torch.uint8),
    "boolean": torch.tensor([True, False, True]),
    "a scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(60.0).view(6, 10).t(),
}


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_content_swap_exchanges_values_in_place(weight: torch.Tensor) -> None:
    live, shadow = weight.clone(), torch.zeros_like(weight)
    pointers = live.data_ptr(), shadow.data_ptr()
    how = ContentSwap(torch.device("cpu"), SPARE_BYTES)
    how.check("weight", live, shadow)
    with Operations() as done:
        how.swap(live, shadow)
    assert torch.equal(shadow, weight)
    assert torch.equal(live, torch.zeros_like(weight))
    assert (live.data_ptr(), shadow.data_ptr()) == pointers
    assert done.names <= ALLOWED
    how.swap(live, shadow)
    assert torch.equal(live, weight)


def test_content_swap_keeps_neighbouring_memory() -> None:
    memory = torch.arange(60.0)
    live, shadow = memory[20:40], torch.zeros(20)
    ContentSwap(torch.device("cpu"), SPARE_BYTES).swap(live, shadow)
    assert torch.equal(shadow, torch.arange(20.0, 40.0))
    memory[20:40] += torch.arange(20.0, 40.0)
    assert torch.equal(memory, torch.arange(60.0))


def test_weight_with_holes_is_refused() -> None:
    live = torch.arange(40.0).view(4, 10)[:, :5]
    how = ContentSwap(torch.device("cpu"), SPARE_BYTES)
    with pytest.raises(Unproven, match="'weight' cannot be staged: its memory has holes"):
        how.check("weight", live, torch.empty_like(live))


def test_weight_kept_on_the_host_is_refused() -> None:
    live = torch.zeros(4)
    how = ContentSwap(torch.device("meta"), SPARE_BYTES)
    with pytest.raises(Unproven, match="'weight' cannot be staged: it is kept on the host"):
        how.check("weight", live, torch.zeros(4))

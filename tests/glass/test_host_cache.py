"""Torch's own calls reach the allocator of pinned memory."""

from __future__ import annotations

from typing import Any

import torch

from tests.glass.card import on_card

glass: Any = torch.get_device_module("glass")


@on_card()
def test_free_pinned_memory_goes_when_torch_is_asked_and_used_memory_stays() -> None:
    # before a device is used torch asks nothing of it
    torch.zeros(1, device="glass")
    used = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    torch.empty(1 << 21, dtype=torch.uint8, pin_memory=True)
    assert glass.pinned_bytes() == (1 << 20, 1 << 21)
    torch.accelerator.memory.empty_host_cache()
    assert glass.pinned_bytes() == (1 << 20, 0)
    assert used.is_pinned()

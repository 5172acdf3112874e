"""Release and return of memory on the reference platform, and a touch of released memory."""

from __future__ import annotations

import os
import signal

import torch

from sglang_inflight_tools.reference import PageSaver
from tests.support import resident as memory

MIB = 1 << 20
SIZE = 64 * MIB


def resident() -> int:
    """Resident bytes of this process."""
    return memory.resident(os.getpid())


def saver_of(**tensors: list[torch.Tensor]) -> PageSaver:
    saver = PageSaver()
    saver.look_in(lambda tag: tensors[tag])
    return saver


def test_released_memory_returns_at_its_address() -> None:
    weights = torch.ones(SIZE, dtype=torch.uint8)
    cache = torch.ones(SIZE, dtype=torch.uint8)
    # a view shares its storage, and a commit may have swapped the storage since
    saver = saver_of(weights=[weights, weights[: SIZE // 2]], kv_cache=[cache])
    address, before = weights.data_ptr(), resident()
    saver.pause("weights")
    assert before - resident() > 0.9 * SIZE
    saver.pause("kv_cache")
    assert before - resident() > 0.9 * 2 * SIZE
    saver.resume("weights")
    assert weights.data_ptr() == address
    # the ends of a storage keep their contents: their pages may be shared
    assert weights.sum().item() < 2 * os.sysconf("SC_PAGESIZE")
    weights.fill_(2)
    assert weights.sum().item() == 2 * SIZE
    saver.resume("kv_cache")
    cache.fill_(3)
    assert before - resident() < 0.1 * SIZE


def test_shared_pages_are_not_released() -> None:
    """No page belongs to a tensor smaller than a page."""
    small = [torch.full((100,), float(i)) for i in range(50)]
    saver = saver_of(weights=small)
    saver.pause("weights")
    for i, tensor in enumerate(small):
        assert tensor.sum().item() == 100 * i
    saver.resume("weights")


def test_touch_of_released_memory_crashes() -> None:
    weights = torch.ones(SIZE, dtype=torch.uint8)
    saver = saver_of(weights=[weights])
    saver.pause("weights")
    child = os.fork()
    if child == 0:
        os.close(2)
        weights[SIZE // 2].item()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) in (signal.SIGSEGV, signal.SIGBUS)
    saver.resume("weights")
    assert weights[SIZE // 2].item() == 0

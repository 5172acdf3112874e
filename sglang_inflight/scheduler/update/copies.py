"""Copies of memory about to be released: of a GPU on the host, of a host on its disk.

The staging thread makes a copy while the original is still in place. The scheduler's thread puts
it back when the original's memory is resumed, at the same addresses. Without the copy the contents
cannot be restored.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from sglang_inflight.host_memory import available_to_this_rank, pinned_bytes
from sglang_inflight.storages import distinct_storages
from sglang_inflight.vocabulary.errors import Conflict


class Copy(Protocol):
    def put_back(self) -> None:
        """Restore the contents of the originals' memory."""


class HostCopy:
    """A copy of a device's memory in pinned host memory, copied at the speed of the bus."""

    def __init__(self, memory: Iterable[torch.Tensor], check: Callable[[], None]) -> None:
        """Copy ``memory``. Raise ``Conflict`` if the host has no room for it."""
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        originals = list(memory)
        _require(sum(map(pinned_bytes, originals)), available_to_this_rank(), "the host's memory")
        for original in originals:
            check()
            copy = torch.empty_like(original, device="cpu", pin_memory=True)
            copy.copy_(original, non_blocking=True)
            self._pairs.append((original, copy))
        self._synchronize()

    def put_back(self) -> None:
        for original, copy in self._pairs:
            original.copy_(copy, non_blocking=True)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._pairs:
            torch.get_device_module(self._pairs[0][0].device).current_stream().synchronize()


class FileCopy:
    """A copy of host memory in an unnamed file, because a copy in memory would free nothing.

    The file is in the directory for temporary files. ``TMPDIR`` should be on a disk.
    """

    def __init__(self, memory: Iterable[torch.Tensor], check: Callable[[], None]) -> None:
        """Copy ``memory``. Raise ``Conflict`` if the directory has no room for it."""
        self._memory = list(memory)
        folder = tempfile.gettempdir()
        needed = sum(original.nbytes for original in self._memory)
        _require(needed, shutil.disk_usage(folder).free, f"{folder} (TMPDIR)")
        # closed when this object is freed
        self._file = tempfile.TemporaryFile(prefix="sglang-inflight-")  # noqa: SIM115
        for original in self._memory:
            check()
            self._file.write(memoryview(original.numpy().data))
        self._file.flush()

    def put_back(self) -> None:
        self._file.seek(0)
        for original in self._memory:
            self._fill(memoryview(original.numpy().data))

    def _fill(self, memory: memoryview) -> None:
        while len(memory):
            read = self._file.readinto(memory)
            if not read:
                raise OSError("the copy of the weights is shorter than the weights")
            memory = memory[read:]


def _require(needed: int, free: int, where: str) -> None:
    if needed > free:
        raise Conflict(
            f"a copy of the weights takes {needed >> 20} MiB of {where}, and {free >> 20} MiB are "
            'free for this rank. keep_weights="discard" keeps none: an update must bring them'
        )


def copy_of(
    tensors: Iterable[torch.Tensor], device: torch.device, check: Callable[[], None]
) -> Copy:
    """Copy the whole storages of ``tensors``, once each. ``check`` raises to cancel."""
    on_host = device.type == "cpu"
    memory = [each for each in storages_of(tensors) if (each.device.type == "cpu") == on_host]
    return FileCopy(memory, check) if on_host else HostCopy(memory, check)


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the distinct storages of ``tensors``, as byte tensors."""
    return [
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for storage in distinct_storages(tensors)
        if storage.nbytes()
    ]

"""Staging gives way to decoding."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import torch
from threadpoolctl import threadpool_limits

# A twentieth of what one core of a small server moves, and a thirtieth of an H100's memory.
_CPU_BYTES_PER_S = 256 << 20
_DEVICE_BYTES_PER_S = 100 << 30

# What may be touched in this time is touched in one go, which delays one step by less.
_PIECE_S = 1 / 16
# A sleep costs a quarter of a millisecond, most of it in caches gone cold: what is less is
# owed, and slept with the next.
_SHORTEST_SLEEP_S = _PIECE_S / 2
# How long it takes to see that nothing runs any more.
_LONGEST_SLEEP_S = 0.1


def choose_rate(wanted: int | None, device: torch.device) -> int:
    """Bytes per second: what is set, or what suits the kind of device."""
    if wanted is not None:
        return wanted
    return _CPU_BYTES_PER_S if device.type == "cpu" else _DEVICE_BYTES_PER_S


class RateLimit:
    """A rate at which memory may be touched while requests run; 0 does not limit it.

    Decoding loses to staging a share of a core and of the memory's bandwidth. A rate makes
    it the same share of every step, be the steps long or short. All of it runs on the
    staging thread, which sleeps: the loop has no part in it.
    """

    def __init__(self, bytes_per_s: int, is_busy: Callable[[], bool]) -> None:
        """``is_busy`` says whether requests run; it only reads, from this thread."""
        self._bytes_per_s = bytes_per_s
        self._piece = bytes_per_s * _PIECE_S
        self._is_busy = is_busy
        self._owed_until = 0.0

    def for_another_thread(self) -> RateLimit:
        """Of the same rate. A thread keeps to its own, and rests by itself."""
        return RateLimit(self._bytes_per_s, self._is_busy)

    def is_one_piece(self, nbytes: int) -> bool:
        """Whether so much is touched in one go."""
        return not self._bytes_per_s or nbytes <= self._piece

    def cut(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """The same rows of each of ``tensors``, piece by piece, with a rest after each."""
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if self.is_one_piece(nbytes) or tensors[0].dim() == 0:
            yield tensors
            self.spend(nbytes)
            return
        rows = max(1, int(len(tensors[0]) * self._piece / nbytes))
        for piece in zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True):
            yield piece
            self.spend(sum(tensor.nbytes for tensor in piece))

    def spend(self, nbytes: int) -> None:
        """Rest after ``nbytes`` were touched, for as long as that should have taken."""
        if not self._bytes_per_s:
            return
        # what the work itself took counts, but time without work is not saved up
        earliest = time.monotonic() - _PIECE_S
        self._owed_until = max(self._owed_until, earliest) + nbytes / self._bytes_per_s
        while (left := self._owed_until - time.monotonic()) > _SHORTEST_SLEEP_S:
            if not self._is_busy():
                self._owed_until = 0.0
                return
            time.sleep(min(left, _LONGEST_SLEEP_S))


def yield_cores(niceness: int) -> None:
    """Make the calling thread the least of those that want a core.

    On a CPU server decoding and staging share the cores. One thread for torch's loops,
    and a lower priority if one is set, which Linux keeps per thread. A thread that waits for
    a core may be holding the interpreter, which then nobody has: so none is set as a rule.
    """
    threadpool_limits(limits=1, user_api="openmp")
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)

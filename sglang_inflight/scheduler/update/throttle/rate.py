"""Staging gives way to decoding."""

from __future__ import annotations

import os
import sys
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
# More Python there is not between two calls of ``spend``. What took longer was in torch's kernels
# and copies, which do not hold the interpreter.
_LONGEST_PYTHON_S = 0.0005
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
    it the same share of every step, be the steps long or short. Of small tensors that share is
    the interpreter's: each costs a loader some 0.3 ms in Python, whatever its bytes, and a step
    waits for the interpreter meanwhile. So the processor's time that this thread has taken
    counts, too. All of it runs on the staging thread, which sleeps: the loop has no part in it.
    """

    def __init__(
        self, bytes_per_s: int, is_busy: Callable[[], bool], interpreter_share: float = 1.0
    ) -> None:
        """``is_busy`` says whether requests run; it only reads, from this thread.

        ``interpreter_share`` of its time may the thread that spends be in Python; 1 does not
        limit it.
        """
        self._bytes_per_s = bytes_per_s
        self._interpreter_share = interpreter_share
        # of the thread that spends, at its last call
        self._thread_time: float | None = None
        self._piece = bytes_per_s * _PIECE_S
        self._is_busy = is_busy
        self._owed_until = 0.0

    def for_another_thread(self) -> RateLimit:
        """Of the same rate. A thread keeps to its own, and rests by itself."""
        return RateLimit(self._bytes_per_s, self._is_busy, self._interpreter_share)

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
        """Rest after ``nbytes`` were touched, for as long as that should have taken.

        Cheap, and of use where no byte was touched: Python has run since the last call.
        """
        if not self._bytes_per_s:
            return
        owed = max(nbytes / self._bytes_per_s, self._python_s() / self._interpreter_share)
        # what the work itself took counts, but time without work is not saved up
        earliest = time.monotonic() - _PIECE_S
        self._owed_until = max(self._owed_until, earliest) + owed
        while (left := self._owed_until - time.monotonic()) > _SHORTEST_SLEEP_S:
            if not self._is_busy():
                self._owed_until = 0.0
                return
            time.sleep(min(left, _LONGEST_SLEEP_S))

    def _python_s(self) -> float:
        """Seconds that this thread was in Python since the last call, as far as it is known."""
        if self._interpreter_share == 1:
            return 0.0
        now, before = time.thread_time(), self._thread_time
        self._thread_time = now
        return 0.0 if before is None else min(now - before, _LONGEST_PYTHON_S)


def switch_often(interval_s: float) -> None:
    """Let a thread have the interpreter ``interval_s`` after it asks for it; 0 changes nothing.

    A step gives the interpreter up at each of its calls to torch, some hundreds of times, and
    wants it back at once. A staging thread that runs Python has taken it by then, and keeps it
    for Python's interval, 5 ms, each time: beside pure Python a step of 0.7 ms took 82 ms in one
    of twenty. With 0.2 ms it took 4 to 13.

    The interval is the process's, and only a thread that waits looks at it: where one thread
    alone runs Python it costs nothing. Where two do, a switch costs some 10 µs every 0.2 ms. So
    it is set once, in scheduler processes alone, where the loop is what must not wait.
    """
    if interval_s:
        sys.setswitchinterval(interval_s)


def yield_cores(niceness: int) -> None:
    """Make the calling thread the least of those that want a core.

    On a CPU server decoding and staging share the cores. One thread for torch's loops,
    and a lower priority if one is set, which Linux keeps per thread. A thread that waits for
    a core may be holding the interpreter, which then nobody has: so none is set as a rule.
    """
    threadpool_limits(limits=1, user_api="openmp")
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)

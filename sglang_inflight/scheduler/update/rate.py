"""Limits the rate of staging in favour of decoding."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from threadpoolctl import threadpool_limits

# A small server's core copies eight times as much, and an H100's memory moves thirty times as much.
_CPU_BYTES_PER_S = 640 << 20
_DEVICE_BYTES_PER_S = 100 << 30

# The bytes of this time are touched in one go. The delay of a step by one piece is shorter.
_PIECE_S = 1 / 32
# A sleep costs a quarter of a millisecond, most of it in caches gone cold. A shorter sleep is added
# to the next one.
_SHORTEST_SLEEP_S = _PIECE_S / 2
# Between two calls of ``spend`` Python takes no longer. The rest is in torch's kernels and copies,
# without the interpreter.
_LONGEST_PYTHON_S = 0.0005
# items of ``paced`` within that time
_ITEMS = 64
# Delay until a sleeper sees that no request runs.
_LONGEST_SLEEP_S = 0.1

T = TypeVar("T")


def choose_rate(wanted: int | None, device: torch.device) -> int:
    """Return bytes per second: ``wanted``, or the default of the kind of device."""
    if wanted is not None:
        return wanted
    return _CPU_BYTES_PER_S if device.type == "cpu" else _DEVICE_BYTES_PER_S


class RateLimit:
    """A limit on memory touched per second while requests run; 0 is no limit.

    Staging takes a share of a core and of the memory's bandwidth from decoding. With a rate this
    share is the same in every step, long or short. With small tensors the share is one of the
    interpreter: a tensor costs a model's loader some 0.3 ms in Python, and a load plan some
    microseconds, whatever its bytes, and a step waits for the interpreter meanwhile. So the staging
    thread's processor time counts, too. Only the staging thread sleeps; the loop has no part in it.
    """

    def __init__(
        self, bytes_per_s: int, is_busy: Callable[[], bool], interpreter_share: float = 1.0
    ) -> None:
        """``is_busy`` says whether requests run. The limited thread calls it, and it only reads.

        ``interpreter_share`` is the share of its time this thread may be in Python; 1 is no limit.
        """
        self._bytes_per_s = bytes_per_s
        self._interpreter_share = interpreter_share
        # processor time of the limited thread, at its last call
        self._thread_time: float | None = None
        self._piece = bytes_per_s * _PIECE_S
        self._is_busy = is_busy
        self._owed_until = 0.0

    def limit_this_thread(self) -> None:
        """Let ``yield_gil`` sleep in the calling thread by this limit, from now on."""
        _of_thread.limit = self

    def for_another_thread(self) -> RateLimit:
        """Return a limit of the same rate. Each thread has its own limit, and sleeps by itself."""
        return RateLimit(self._bytes_per_s, self._is_busy, self._interpreter_share)

    def is_one_piece(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` are touched in one go."""
        return not self._bytes_per_s or nbytes <= self._piece

    def cut(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the same rows of each of ``tensors``, piece by piece, and sleep after each."""
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
        """Sleep until the ``nbytes`` just touched fit the rate.

        A call is cheap. With 0 bytes it still counts the Python since the last call.
        """
        if self._bytes_per_s:
            python_s = min(self._python_s(), _LONGEST_PYTHON_S)
            self._owe(max(nbytes / self._bytes_per_s, python_s / self._interpreter_share))

    def leave_out_time(self) -> None:
        """Count none of the time since the last call as Python's: a hash leaves others that."""
        self._python_s()

    def spend_python(self) -> None:
        """Sleep for all processor time since the last call: that of a model's loader in Python."""
        if self._bytes_per_s:
            self._owe(self._python_s() / self._interpreter_share)

    def _owe(self, seconds: float) -> None:
        # the work's own time counts, but idle time is not saved up
        earliest = time.monotonic() - _PIECE_S
        self._owed_until = max(self._owed_until, earliest) + seconds
        while (left := self._owed_until - time.monotonic()) > _SHORTEST_SLEEP_S:
            if not self._is_busy():
                self._owed_until = 0.0
                return
            time.sleep(min(left, _LONGEST_SLEEP_S))

    def _python_s(self) -> float:
        """Return this thread's processor seconds since the last call."""
        if self._interpreter_share == 1:
            return 0.0
        now, before = time.thread_time(), self._thread_time
        self._thread_time = now
        return 0.0 if before is None else now - before


# a limit that keeps nothing back has no state, so threads may share it
UNPACED = RateLimit(0, lambda: False)

_of_thread = threading.local()


def yield_gil() -> None:
    """Sleep if this thread stages and has worked for longer than its pace allows.

    Call it in loops over a model's modules or weights. A step takes the GIL at each of its calls
    to torch, so 10 ms of Python on another thread delay the step by more. The caller must hold no
    lock that the loop may want.
    """
    limit: RateLimit | None = getattr(_of_thread, "limit", None)
    if limit is not None:
        limit.spend(0)


def paced(items: Iterable[T]) -> Iterator[T]:
    """Yield ``items``, some microseconds of Python each, and ``yield_gil`` after every few."""
    for at, item in enumerate(items, start=1):
        yield item
        if not at % _ITEMS:
            yield_gil()


def switch_often(interval_s: float) -> None:
    """Give a thread the interpreter ``interval_s`` after its request; 0 changes nothing.

    A step gives up the interpreter at each of its calls to torch, some hundreds of times, and
    needs it back at once. A staging thread in Python has taken it by then, and keeps it for
    Python's interval of 5 ms each time. Beside pure Python one step of 0.7 ms in twenty took 82 ms.
    With an interval of 0.2 ms it took 4 to 13.

    The interval is the process's, and only a waiting thread looks at it. So it costs nothing while
    one thread alone runs Python. With two, a switch costs some 10 µs every 0.2 ms. So it is set
    once, and only in scheduler processes, whose loop must not wait.
    """
    if interval_s:
        sys.setswitchinterval(interval_s)


def yield_cores(niceness: int) -> None:
    """Limit the calling thread's use of cores.

    On a CPU server decoding and staging share the cores. The calling thread gets one thread for
    torch's loops, and a lower priority if ``niceness`` is set: Linux keeps it per thread. A thread
    of low priority may hold the interpreter while it waits for a core, and then nobody runs
    Python. So no niceness is set by default.
    """
    use_one_core()
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def use_one_core() -> None:
    """Give the calling thread one thread for torch's loops."""
    threadpool_limits(limits=1, user_api="openmp")


def copy_in_pieces(
    rate_limit: RateLimit, target: torch.Tensor, source: torch.Tensor, *how: Any, **options: Any
) -> None:
    """Do ``target.copy_(source)``, no faster than ``rate_limit`` allows.

    ``how`` and ``options`` are arguments of ``torch.Tensor.copy_``. A source of another shape,
    for torch to expand, is copied at once.
    """
    if target.shape != source.shape:
        target.copy_(source, *how, **options)
        rate_limit.spend(target.nbytes + source.nbytes)
        return
    for to, of in rate_limit.cut(target, source):
        to.copy_(of, *how, **options)

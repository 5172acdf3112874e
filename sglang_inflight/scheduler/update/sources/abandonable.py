"""What may never return is done aside, and given up when its time has run out."""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

import torch

from sglang_inflight.threads import start_thread

T = TypeVar("T")

# how often it is asked whether to go on waiting
_POLL_S = 0.1

_Call = Callable[[], Any]


class AbandonableThread:
    """A thread that makes calls for the one which waits for them, and can be left behind.

    A read from a mount whose server is gone, a connection to a process that was stopped, and
    NCCL where it waits for its peers cannot be interrupted. Whoever makes such a call may be
    lost to it, and the staging thread is needed for the next update. So the call is made here,
    and the staging thread only waits, as long as ``check`` does not raise. A thread that is left
    behind ends when its call does, if ever. What the call returns then is let go of, and it
    reaches nobody.

    There is one call at a time. What it touches is its own from ``begin`` to ``end``, and so
    needs no lock. If ``check`` raised meanwhile it stays the call's own, and must not be used
    again.

    On a device with streams the calls are made on the stream of the thread that waits, because
    what they enqueue must come before what that thread enqueues after them.
    """

    def __init__(self, check: Callable[[], None], device: torch.device | None = None) -> None:
        """``check`` raises when it is time to give up. Raises ``Refused`` without a thread."""
        self._check = check
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        stream = None
        if device is not None and device.type != "cpu":
            stream = torch.get_device_module(device).current_stream(device)
        start_thread(_work, self._calls, self._answers, stream, name="inflight-aside")

    def do(self, call: Callable[[], T]) -> T:
        """What ``call`` returns, or raises. Raises what ``check`` does if that comes first."""
        self.begin(call)
        answer: T = self.end()
        return answer

    def begin(self, call: _Call) -> None:
        """Make ``call`` while the caller does something else, and then waits for its end."""
        self._calls.put(call)

    def end(self) -> Any:
        """Of the call that was begun: as ``do``."""
        while True:
            try:
                value, error = self._answers.get(timeout=_POLL_S)
            except queue.Empty:
                self._check()
            else:
                break
        if error is None:
            return value
        try:
            raise error
        finally:
            # or it would be a cycle, which keeps the tensors of its frames
            del error

    def __enter__(self) -> AbandonableThread:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._calls.put(None)


def _work(
    calls: queue.SimpleQueue[_Call | None],
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]],
    stream: Any,
) -> None:
    context: AbstractContextManager[Any] = nullcontext()
    if stream is not None:
        module = torch.get_device_module(stream.device)
        module.set_device(stream.device)
        context = module.stream(stream)
    with torch.no_grad(), context:
        while (call := calls.get()) is not None:
            try:
                answers.put((call(), None))
            except BaseException as error:
                answers.put((None, error))
            # it may hold what is large
            del call

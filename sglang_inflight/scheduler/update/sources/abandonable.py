"""An abandonable thread for calls that may never return."""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

import torch

from sglang_inflight.threads import start_thread

T = TypeVar("T")

# pause between two calls of ``check``
_POLL_S = 0.1

_Call = Callable[[], Any]


class AbandonableThread:
    """A thread for calls that may never return; the waiting thread can abandon it.

    Some calls cannot be interrupted: a read from a mount without its server, a connection to a
    stopped process, and NCCL's wait for its peers. Such a call may never return, and the staging
    thread is needed for the next update. So this thread makes the call, and the staging thread
    waits until ``check`` raises. An abandoned thread ends with its call, if ever. The call's late
    result is dropped.

    There is one call at a time. From ``begin`` to ``end`` the call owns the objects it touches, so
    no lock is needed. If ``check`` raised meanwhile, the call keeps these objects, and they must
    not be used again.

    On a device with streams the calls run on the waiting thread's stream: their work must come
    before the waiting thread's later work.
    """

    def __init__(self, check: Callable[[], None], device: torch.device | None = None) -> None:
        """``check`` raises when it is time to give up. Raise ``Refused`` if no thread starts."""
        self._check = check
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        stream = None
        if device is not None and device.type != "cpu":
            stream = torch.get_device_module(device).current_stream(device)
        start_thread(_work, self._calls, self._answers, stream, name="inflight-aside")

    def do(self, call: Callable[[], T]) -> T:
        """Return the result of ``call``, or raise its error, or an earlier one of ``check``."""
        self.begin(call)
        answer: T = self.end()
        return answer

    def begin(self, call: _Call) -> None:
        """Start ``call``; the caller does something else and then calls ``end``."""
        self._calls.put(call)

    def end(self) -> Any:
        """Wait for the begun call, like ``do``."""
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
            # a local reference would be a cycle and keep the tensors of its frames
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
            # the call may hold large objects
            del call

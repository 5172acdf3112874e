"""Runs SGLang's handlers that wait for another process off the scheduler's loop."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_inflight.scheduler.by_version import send_control_output
from sglang_inflight.threads import start_thread
from sglang_inflight.vocabulary.errors import Refused

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import Scheduler

Handler = Callable[[Any], Any]


class BackgroundHandlers:
    """Runs each handler on its own thread: a rendezvous without a peer waits half an hour.

    Answers wait in ``_done`` for the scheduler's thread, because it owns the socket. A deque is
    safe to share between two threads.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._done: collections.deque[tuple[Any, Any]] = collections.deque()

    def send(self, handler: Handler, fail: Callable[[Any, Exception], Any]) -> Handler:
        """Return a handler that starts ``handler``, and answers later.

        ``handler`` must not raise. ``fail`` makes the answer when no thread can start.
        """

        def begin(request: Any) -> Any:
            try:
                start_thread(self._run, handler, request, name="inflight-background")
            except Refused as error:
                return fail(request, error)
            return None

        return begin

    def send_finished_answers(self) -> None:
        """Send the answers of finished handlers. Called at every step boundary."""
        while self._done:
            request, output = self._done.popleft()
            if output is not None:
                send_control_output(self._scheduler, output, request)

    def _run(self, handler: Handler, request: Any) -> None:
        device = next(self._scheduler.tp_worker.model_runner.model.parameters()).device
        if device.type != "cpu":
            torch.get_device_module(device).set_device(device)
        self._done.append((request, handler(request)))

"""The staging thread: everything slow happens here, and nothing else does."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sglang_inflight.messages import InflightCall
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.staging.pace import yield_cores

logger = logging.getLogger(__name__)

Job = Callable[[], dict[str, Any]]


class InlineWorker:
    """Does each job at once, on the caller's thread: for the mode without a shadow."""

    def __init__(self, answers: AnswerChannel, drain: Callable[[], None]) -> None:
        self._answers = answers
        self._drain = drain

    def submit(self, call: InflightCall, job: Job) -> None:
        # no forward may read weights that the job writes
        self._drain()
        try:
            with torch.no_grad():
                detail = job()
        except Exception as error:
            self._answers.fail(call, error)
        else:
            self._answers.succeed(call, **detail)


class StagingWorker:
    """One thread per rank that does the jobs it is given, in order, and answers for each.

    The scheduler's thread only puts jobs in. A job that raises answers with its error and
    the thread goes on: no call can end it. On CUDA it works on a stream of its own, and a
    job is answered when that stream has finished, so the caller's buffers are free then.
    """

    def __init__(self, answers: AnswerChannel, device: torch.device, niceness: int) -> None:
        self._answers = answers
        self._device = device
        self._niceness = niceness
        self._jobs: queue.SimpleQueue[tuple[InflightCall, Job]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="inflight-staging", daemon=True).start()

    def submit(self, call: InflightCall, job: Job) -> None:
        """Do ``job`` after all others, then answer ``call`` with what it returns."""
        self._jobs.put((call, job))

    def _run(self) -> None:
        stream: Any = None
        if self._device.type == "cpu":
            yield_cores(self._niceness)
        else:
            torch.get_device_module(self._device).set_device(self._device)
            stream = torch.Stream(self._device)
        while True:
            call, job = self._jobs.get()
            context: AbstractContextManager[Any] = stream if stream is not None else nullcontext()
            try:
                with torch.no_grad(), context:
                    detail = job()
                if stream is not None:
                    stream.synchronize()
            except Exception as error:
                self._answers.fail(call, error)
            else:
                self._answers.succeed(call, **detail)
            # a job holds the caller's tensors: let them go before the next one comes
            del call, job

"""The staging thread: does the slow part of updates off the scheduler's loop, job by job."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from sglang.srt.managers.utils import allocate_distinct_stream
from torch import nn

from sglang_inflight.messages import A, InflightCall
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.update.rate import RateLimit, yield_cores
from sglang_inflight.sglang_types import get_resources

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import Scheduler

logger = logging.getLogger(__name__)

# returns the answer to its call
Job = Callable[[], A]


class Worker(Protocol):
    def submit(self, call: InflightCall[A], job: Job[A]) -> None:
        """Do ``job`` after all earlier jobs, then answer ``call`` with its result."""

    def do(self, job: Callable[[], None]) -> None:
        """Do ``job`` after all earlier jobs. Nobody waits for it."""


class InlineWorker:
    """Does each job at once, on the caller's thread: for the mode without a shadow.

    A job is answered when the device has done it, with its error too: then the caller's buffers are
    free.
    """

    # jobs use the loop's own stream
    stream: Any = None

    def __init__(
        self, answers: AnswerChannel, device: torch.device, prepare_to_hold: Callable[[], None]
    ) -> None:
        self._answers = answers
        self._device = device
        self._prepare_to_hold = prepare_to_hold

    def submit(self, call: InflightCall[A], job: Job[A]) -> None:
        # no forward may read weights while the job writes them
        self._prepare_to_hold()
        stream = None
        if self._device.type != "cpu":
            stream = torch.get_device_module(self._device).current_stream()
        try:
            with torch.no_grad(), finished_on(stream):
                answer = job()
        # a custom loader may call ``sys.exit``, here on the scheduler's own thread
        except (Exception, SystemExit) as error:
            self._answers.fail(call, error)
        else:
            self._answers.succeed(call, answer)

    def do(self, job: Callable[[], None]) -> None:
        job()


class StagingWorker:
    """One thread per rank, for jobs in order, each with an answer.

    The scheduler's thread only queues jobs. A job that raises is answered with its error, and the
    thread goes on. No exception of a job or of an answer ends the thread, not even a custom
    loader's ``sys.exit``. On CUDA the thread works on a stream of its own. A job is answered when
    that stream has finished, with its error too: then the caller's buffers are free.
    """

    def __init__(
        self,
        answers: AnswerChannel,
        device: torch.device,
        niceness: int,
        rate_limit: RateLimit,
        streams_in_use: Callable[[], Iterable[Any]],
        *,
        name: str = "inflight-staging",
    ) -> None:
        """``streams_in_use`` returns the streams of the loop and its forwards, once it runs."""
        self._answers = answers
        self._device = device
        self._niceness = niceness
        self._rate_limit = rate_limit
        self.streams_in_use = streams_in_use
        # made by the thread; the loop may enqueue work on it
        self.stream: Any = None
        self._jobs: queue.SimpleQueue[tuple[InflightCall[Any] | None, Job[Any]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: InflightCall[A], job: Job[A]) -> None:
        self._jobs.put((call, job))

    def do(self, job: Callable[[], None]) -> None:
        self._jobs.put((None, job))

    def _run(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_device(self._device)
        else:
            yield_cores(self._niceness)
        self._rate_limit.limit_this_thread()
        while True:
            call, job = self._jobs.get()
            try:
                if call is None:
                    self._do(job)
                else:
                    self._answer(call, job)
            except BaseException:
                # the front end takes this rank for silent in this call; the next job is answered
                logger.exception("%s could not be answered", type(call).__name__)
            # a job holds the caller's tensors: release them before waiting for the next
            del call, job

    def _answer(self, call: InflightCall[A], job: Job[A]) -> None:
        try:
            answer = self._do(job)
        except BaseException as error:
            self._answers.fail(call, error)
        else:
            self._answers.succeed(call, answer)

    def _do(self, job: Job[A]) -> A:
        if self._device.type != "cpu" and self.stream is None:
            # not earlier: the loop may replace its own streams when it begins
            self.stream = own_stream(self._device, self.streams_in_use())
        with torch.no_grad(), self.stream or nullcontext(), finished_on(self.stream):
            return job()


@contextmanager
def finished_on(stream: Any) -> Iterator[None]:
    """Wait at the block's end until ``stream`` has done the block's work; None is no device.

    The block reads memory of another process. That process frees the memory when it is told that
    the block has ended, or has failed.
    """
    try:
        yield
    except BaseException:
        finish(stream)
        raise
    if stream is not None:
        stream.synchronize()


def finish(stream: Any) -> None:
    """Wait for the work on ``stream`` after an error, which a failure of this wait does not hide.

    A device that has failed fails every wait, and reads nothing any more.
    """
    if stream is not None:
        try:
            stream.synchronize()
        except Exception:
            logger.exception("The device did not finish the work of a failed job.")


def streams_of(scheduler: Scheduler, models: Iterable[nn.Module]) -> list[Any]:
    """Return the streams of the loop, of its forwards, and of the modules of ``models``."""
    own = ("schedule_stream", "forward_stream", "copy_stream", "pp_comm_stream")
    found = [getattr(scheduler, name, None) for name in own]
    for model in models:
        found += _streams_in(model)
    return [s for s in (*found, *get_resources().streams.values()) if s is not None]


def _streams_in(model: nn.Module) -> Iterator[Any]:
    """Yield the streams that modules keep as attributes, or in a list."""
    for module in model.modules():
        # a forward may set an attribute meanwhile
        for value in tuple(vars(module).values()):
            for one in value if isinstance(value, list | tuple) else (value,):
                if isinstance(one, torch.Stream):
                    yield one


def own_stream(device: torch.device, in_use: Iterable[Any]) -> Any:
    """Return a stream outside of ``in_use``.

    CUDA hands out the streams of a pool of 32 in turn. A new stream may be the forwards' own, and
    forwards would wait for each job. If streams show no handle, there is no such pool.
    """
    module = torch.get_device_module(device)
    taken = [stream for stream in in_use if hasattr(stream, "cuda_stream")]
    return allocate_distinct_stream(module, taken) if taken else module.Stream()

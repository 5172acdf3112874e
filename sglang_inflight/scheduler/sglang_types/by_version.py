"""Differences between the supported versions of SGLang. No other code checks the version.

SGLang 0.5.22 does not record when a pause began, and has no methods to send the outputs of control
calls and aborts. ``patches/README.md`` has the whole list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol, cast

from packaging.version import Version

from sglang_inflight.sglang_types.describes import describes

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.scheduler import Scheduler

_IS_0_5_22 = Version(version("sglang")) < Version("0.5.23")


@describes("sglang.srt.managers.scheduler.Scheduler", since="0.5.23")
class _Since0523(Protocol):
    # time.monotonic(); None while nothing is paused
    _pause_started_at: float | None

    def send_control_output(self, output: Any, recv_req: Any) -> None: ...
    def send_abort_output(self, abort_req: Any, req: Any) -> None: ...


@contextmanager
def paused_as_it_was(scheduler: Scheduler) -> Iterator[None]:
    """Restore the loop's pause state, and the time of its start, after the block."""
    was_paused = scheduler._engine_paused
    newer = cast(_Since0523, scheduler)
    started_at = None if _IS_0_5_22 else newer._pause_started_at
    yield
    scheduler._engine_paused = was_paused
    if not _IS_0_5_22:
        newer._pause_started_at = started_at


def send_control_output(scheduler: Scheduler, output: Any, request: Any) -> None:
    """Answer a control request after its handler has returned."""
    if _IS_0_5_22:
        # SGLang 0.5.23 also answers its Rust server, but a server refuses to start with that
        scheduler.ipc_channels.send_to_tokenizer.send_output(output, request)
    else:
        cast(_Since0523, scheduler).send_control_output(output, request)


def send_abort_output(scheduler: Scheduler, abort: Any, request: Any) -> None:
    """Tell the front end that a request outside any forward has ended."""
    if _IS_0_5_22:
        scheduler.ipc_channels.send_to_tokenizer.send_output(abort, request)
    else:
        cast(_Since0523, scheduler).send_abort_output(abort, request)

"""What the supported versions of SGLang do differently. Nothing else asks for the version.

0.5.22 keeps no time of a pause's begin, and sends the outputs of control calls and of aborts from
where they are made. ``patches/README.md`` has the whole list.
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
    """The loop is as paused after the block as before it, and as long, whatever it calls."""
    was_paused = scheduler._engine_paused
    newer = cast(_Since0523, scheduler)
    started_at = None if _IS_0_5_22 else newer._pause_started_at
    yield
    scheduler._engine_paused = was_paused
    if not _IS_0_5_22:
        newer._pause_started_at = started_at


def send_control_output(scheduler: Scheduler, output: Any, request: Any) -> None:
    """Answer a control request when its handler has returned long ago."""
    if _IS_0_5_22:
        # to the Rust server, too, in the newer one; a start refuses that
        scheduler.ipc_channels.send_to_tokenizer.send_output(output, request)
    else:
        cast(_Since0523, scheduler).send_control_output(output, request)


def send_abort_output(scheduler: Scheduler, abort: Any, request: Any) -> None:
    """Tell the front end that a request has ended of which no forward tells it."""
    if _IS_0_5_22:
        scheduler.ipc_channels.send_to_tokenizer.send_output(abort, request)
    else:
        cast(_Since0523, scheduler).send_abort_output(abort, request)

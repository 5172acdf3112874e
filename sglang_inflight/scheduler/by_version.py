"""Differences between the supported versions of SGLang. No other code checks the version.

SGLang 0.5.22 does not record when a pause began, and has no methods to send the outputs of control
calls and aborts. ``patches/README.md`` has the whole list. mypy reads only the branches of the
version that it checks: ``always_false`` in ``pyproject.toml``, and ``harness/porting/uses.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from packaging.version import Version

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import Scheduler

IS_0_5_22 = Version(version("sglang")) < Version("0.5.23")


@contextmanager
def paused_as_it_was(scheduler: Scheduler) -> Iterator[None]:
    """Restore the loop's pause state, and the time of its start, after the block."""
    was_paused = scheduler._engine_paused
    if IS_0_5_22:
        yield
    else:
        started_at = scheduler._pause_started_at
        yield
        scheduler._pause_started_at = started_at
    scheduler._engine_paused = was_paused


def send_control_output(scheduler: Scheduler, output: Any, request: Any) -> None:
    """Answer a control request after its handler has returned."""
    if IS_0_5_22:
        # SGLang 0.5.23 also answers its Rust server, but a server refuses to start with that
        scheduler.ipc_channels.send_to_tokenizer.send_output(output, request)
    else:
        scheduler.send_control_output(output, request)


def send_abort_output(scheduler: Scheduler, abort: Any, request: Any) -> None:
    """Tell the front end that a request outside any forward has ended."""
    if IS_0_5_22:
        scheduler.ipc_channels.send_to_tokenizer.send_output(abort, request)
    else:
        scheduler.send_abort_output(abort, request)

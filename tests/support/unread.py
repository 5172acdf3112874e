"""Fail a test that leaves a failed task whose error no code has read.

The garbage collector logs such an error later, amid another test. Formatting that log parses code,
and Python 3.11.7 then fails an ``ast.parse`` that the collector has interrupted
(python/cpython#106905).
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextvars import Context
from typing import Any

import pytest

# the running test's, held so that no collector takes an unread error along
_TASKS: list[asyncio.Task[Any]] = []
# more are looked through: asyncio asks each task that lives for its loop, at each end of a loop
_MOST_TASKS = 100
_create_task = asyncio.BaseEventLoop.create_task


def _create_and_note_task(
    loop: asyncio.BaseEventLoop, coro: Any, *, name: object = None, context: Context | None = None
) -> asyncio.Task[Any]:
    task = _create_task(loop, coro, name=name, context=context)
    if len(_TASKS) >= _MOST_TASKS:
        _TASKS[:] = [each for each in _TASKS if not each.done() or each._log_traceback]
    _TASKS.append(task)
    return task


def pytest_configure() -> None:
    asyncio.BaseEventLoop.create_task = _create_and_note_task  # type: ignore[assignment, method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    outcome = yield
    # a loop that still runs, in another thread, may be about to read it
    tasks = [task for task in _TASKS if task.done() and not task.get_loop().is_running()]
    _TASKS.clear()
    # asyncio's own mark of an error that nobody has read
    unread = [task for task in tasks if task._log_traceback]
    assert not unread, f"no code has read the errors of {unread}"
    return outcome

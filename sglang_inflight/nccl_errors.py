"""What NCCL does to a process in which a broadcast failed. Imports no SGLang."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

# longer than any update, and short enough for a count of milliseconds
NEVER = timedelta(days=365)

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# read where there is none of the name above
_OLDER_HANDLING = "NCCL_ASYNC_ERROR_HANDLING"
# of torch, where there is neither: end the process
_DEFAULT = "3"
# end the communicator, and not the process
_CLEAN_UP_ONLY = "2"
_environment = threading.Lock()


def name_error_handling() -> None:
    """Write into the environment how torch handles errors anyway. Call it at a process's start.

    A variable that is added, or taken away, moves others, while C++ of other threads may read
    them. One that is there already only gets another value, at one stroke.
    """
    os.environ.setdefault(_HANDLING, os.environ.get(_OLDER_HANDLING, _DEFAULT))


@contextmanager
def errors_cost_the_group_only() -> Iterator[None]:
    """For groups that are made within: torch reads the variable when it makes one, and has no
    option for it.

    A rendezvous should be over by then, so that the lock is not held for long.
    """
    with _environment:
        name_error_handling()
        before = os.environ[_HANDLING]
        os.environ[_HANDLING] = _CLEAN_UP_ONLY
        try:
            yield
        finally:
            os.environ[_HANDLING] = before

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
# end the communicator, and not the process
_CLEAN_UP_ONLY = "2"
_environment = threading.Lock()


@contextmanager
def errors_cost_the_group_only() -> Iterator[None]:
    """For groups that are made within: torch reads the variable when it makes one.

    A rendezvous should be over by then, so that the lock is not held for long.
    """
    with _environment:
        before = os.environ.get(_HANDLING)
        os.environ[_HANDLING] = _CLEAN_UP_ONLY
        try:
            yield
        finally:
            if before is None:
                del os.environ[_HANDLING]
            else:
                os.environ[_HANDLING] = before

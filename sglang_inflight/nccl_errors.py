"""NCCL's handling of a failed broadcast: end the group, not the process. Imports no SGLang."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

# longer than any update, and small enough for torch's count of milliseconds
NEVER = timedelta(days=365)

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# torch reads this one if the one above is not set
_OLDER_HANDLING = "NCCL_ASYNC_ERROR_HANDLING"
# torch's default if neither is set: end the process
_DEFAULT = "3"
# end the communicator, not the process
_CLEAN_UP_ONLY = "2"
_environment = threading.Lock()


def name_error_handling() -> None:
    """Set torch's error handling in the environment to torch's own choice. Call at process start.

    Adding or removing a variable moves others, while other threads' C++ may read them. Changing
    the value of an existing variable is one atomic store.
    """
    os.environ.setdefault(_HANDLING, os.environ.get(_OLDER_HANDLING, _DEFAULT))


@contextmanager
def errors_cost_the_group_only() -> Iterator[None]:
    """Make NCCL errors end only the groups created in the block, not the process.

    Torch has no option for this, and reads the variable when it creates a group. Finish the
    rendezvous before the block, because the block holds a lock.
    """
    with _environment:
        name_error_handling()
        before = os.environ[_HANDLING]
        os.environ[_HANDLING] = _CLEAN_UP_ONLY
        try:
            yield
        finally:
            os.environ[_HANDLING] = before

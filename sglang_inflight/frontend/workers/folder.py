"""The folder that an owner's sockets are in, which outlives no owner for long.

An owner that is killed leaves its folder behind, and the next one on the machine removes it. A
lock on the folder says that its owner lives: the kernel lets go of it with the process, however
that ends. A folder gets the name by which it is looked for when it is locked already, so one that
is being made is not taken for one that was left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "sglang-inflight."


class OwnersFolder:
    """Nobody but this process's user may enter it. It goes with this object."""

    def __init__(self) -> None:
        remove_abandoned(Path(tempfile.gettempdir()))
        made = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}"))
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.path = made
        # where the file system has no locks it keeps a name that nobody looks for
        if _locks(self._lock):
            self.path = made.rename(made.with_name(made.name.removeprefix("new-")))
        weakref.finalize(self, _remove, self.path, self._lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders in ``parent`` whose owners are dead, of this process's user."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with _opened(folder) as lock:
            if lock is not None and _is(lock, folder) and _locks(lock):
                shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


@contextmanager
def _opened(folder: Path) -> Iterator[int | None]:
    """None where it is no folder, or not ours to open."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield opened
    finally:
        os.close(opened)


def _is(opened: int, folder: Path) -> bool:
    """Whether it is this user's, and has not been removed since it was opened."""
    status = os.fstat(opened)
    return status.st_uid == os.geteuid() and status.st_nlink > 0 and folder.exists()


def _locks(opened: int) -> bool:
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

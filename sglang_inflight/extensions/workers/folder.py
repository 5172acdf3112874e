"""The folder of an owner's sockets, and the way by which further tokenizer workers find it.

A killed owner leaves its folder behind, and the next owner on the machine removes it. A living
owner holds a lock on its folder. The kernel releases the lock when the process ends in any way. A
new folder gets its final name only after it is locked, so a folder being created never looks
abandoned.

SGLang loads no plugins in further tokenizer workers. A worker unpickles its server's arguments
before it uses them, and an ``OwnerEndpoint`` among them loads us when unpickled. So we are loaded
under uvicorn, under granian, and in a user's own app.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "sglang-inflight."
# attribute of SGLang's ``PortArgs`` holding the endpoint
ATTRIBUTE = "inflight"


class OwnersFolder:
    """A folder accessible only to this process' user, removed with this object."""

    def __init__(self) -> None:
        remove_abandoned(Path(tempfile.gettempdir()))
        made = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}"))
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.path = made
        # a file system without locks: keep the first name, ignored by the search below
        if _locks(self._lock):
            self.path = made.rename(made.with_name(made.name.removeprefix("new-")))
        weakref.finalize(self, _remove, self.path, self._lock)


def remove_abandoned(parent: Path) -> None:
    """Remove this user's folders of dead owners in ``parent``."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with _opened(folder) as lock:
            if lock is not None and _is(lock, folder) and _locks(lock):
                shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


@contextmanager
def _opened(folder: Path) -> Iterator[int | None]:
    """Yield a descriptor of the folder, or None if it is no folder or not accessible."""
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
    """Return whether the opened folder is this user's, and still exists."""
    status = os.fstat(opened)
    return status.st_uid == os.geteuid() and status.st_nlink > 0 and folder.exists()


def _locks(opened: int) -> bool:
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class OwnerEndpoint:
    """The owner's sockets. Only this server's user can enter ``folder``, so no key is needed."""

    folder: Path

    @property
    def calls(self) -> Path:
        """Socket for HTTP calls."""
        return self.folder / "calls"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def __reduce__(self) -> tuple[Callable[[Path], OwnerEndpoint], tuple[Path]]:
        return accept, (self.folder,)


def accept(folder: Path) -> OwnerEndpoint:
    """Load our plugin and return the endpoint. Ends the process if it cannot be patched."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return OwnerEndpoint(folder)

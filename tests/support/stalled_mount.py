"""A mount without a server behind it: every access blocks until the mount is gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_libc = ctypes.CDLL(None, use_errno=True)
_DETACH = 2


@contextlib.contextmanager
def stalled_mount(folder: Path) -> Iterator[None]:
    """Mount a file system that answers nothing at ``folder``. Skip the test without the right."""
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"a file system of one's own needs /dev/fuse: {error.strerror}")
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if _libc.mount(b"fuse", os.fsencode(folder), b"fuse", 0, options.encode()):
        os.close(device)
        pytest.skip(f"mounting needs the right to: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        os.close(device)
        _libc.umount2(os.fsencode(folder), _DETACH)

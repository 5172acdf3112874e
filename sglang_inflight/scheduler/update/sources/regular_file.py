"""Reads a file without holding the interpreter, and detects changes of the file."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from typing import NamedTuple

from sglang_inflight.vocabulary.errors import Refused


class _Identity(NamedTuple):
    device: int
    inode: int
    size: int
    mtime_ns: int


class RegularFile:
    """A file opened for reading, by ``path``; messages call it ``name``.

    A mapped file would end the process when somebody cuts it short, and its pages could mix two
    versions. So the file is read: a short read is an error, and a change shows in the file's size
    and time. Opening does not wait for a pipe's other end. Every system call is made without the
    interpreter, however long it takes.
    """

    def __init__(self, path: str, name: str) -> None:
        self.name = name
        self._path = path
        self._file = _open(path, name)
        try:
            self._identity = _identify(self._file, name)
        except BaseException:
            self._file.close()
            raise

    @property
    def size(self) -> int:
        return self._identity.size

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Read once at ``offset``. Return the number of bytes, 0 only at the file's end."""
        # ``fileno`` raises for a closed file, so no other file's descriptor is read
        return os.preadv(self._file.fileno(), [buffer], offset)

    def read(self, size: int, offset: int) -> bytes:
        """Return exactly ``size`` bytes, as a copy. Raise ``Refused`` if the file ends before."""
        content = bytearray(size)
        with memoryview(content) as view:
            done = 0
            while done < size:
                read = self.read_into(view[done:], offset + done)
                if not read:
                    raise self.was_cut()
                done += read
        return bytes(content)

    def was_cut(self) -> Refused:
        return Refused(f"{self.name} ends too early")

    def check_unchanged(self) -> None:
        """Raise ``Refused`` if the file was written or replaced since it was opened."""
        with _open(self._path, self.name) as again:
            # opened again, because a network mount asks its server at the opening
            if (
                not _identify(again, self.name)
                == _identify(self._file, self.name)
                == (self._identity)
            ):
                raise Refused(f"{self.name} changed while it was read")

    def forget_pages(self) -> None:
        """Ask the kernel to drop the file from memory."""
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._file.close()


def _open(path: str, name: str) -> io.FileIO:
    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)

    try:
        return io.FileIO(path, "r", opener=opener)
    except IsADirectoryError:
        raise Refused(f"{name} is no regular file") from None
    except OSError as error:
        raise Refused(f"{name} cannot be opened: {error.strerror}") from error


def _identify(file: io.FileIO, name: str) -> _Identity:
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise Refused(f"{name} is no regular file")
    return _Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class Stream(io.RawIOBase):
    """A regular file as a stream for readers of the standard library and of torch.

    Use it inside of ``io.BufferedReader``: large reads go straight to their destination, without
    the interpreter.
    """

    def __init__(self, size: int, read_into: Callable[[memoryview, int], int]) -> None:
        """``read_into`` reads at an offset below ``size``, into a buffer that ends below it."""
        self._size = size
        self._read_into = read_into
        self._offset = 0

    @classmethod
    def of(cls, file: RegularFile) -> io.BufferedReader:
        def read_into(buffer: memoryview, offset: int) -> int:
            read = file.read_into(buffer, offset)
            if not read:
                raise file.was_cut()
            return read

        return io.BufferedReader(cls(file.size, read_into))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"seek to {start + offset}")
        self._offset = start + offset
        return self._offset

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._offset)]  # type: ignore[arg-type]
        read = self._read_into(view, self._offset) if view else 0
        self._offset += read
        return read

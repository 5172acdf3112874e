"""Reads a file without holding the interpreter, and detects changes of the file.

``ReadBuffers`` hold a checkpoint's tensors, read one after the other.
"""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import stat
import sys
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

import torch

from sglang_inflight.vocabulary.errors import Refused

# ctypes, unlike ``mmap.madvise``, releases the interpreter during the call
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_MOST_BUFFERS = 3
_HUGE_PAGE = 2 << 20


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

    def __init__(self, path: str, name: str, *, follows_links: bool = True) -> None:
        self.name = name
        self._path = path
        self._flags = os.O_NONBLOCK | os.O_CLOEXEC | (0 if follows_links else os.O_NOFOLLOW)
        self._file = _open(path, name, self._flags)
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
        with _open(self._path, self.name, self._flags) as again:
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


def read_whole(path: str, name: str, most: int) -> bytes | None:
    """Return a file's content, or None if there is no file.

    Raises ``Refused`` if it is no regular file, leads nowhere as a link, or has more than ``most``
    bytes; and ``OSError`` if the file system does not tell whether there is a file.
    """
    try:
        os.lstat(path)
    except FileNotFoundError:
        return None
    with closing(RegularFile(path, name)) as file:
        if file.size > most:
            raise Refused(f"{name} has {file.size} bytes, at most {most} are allowed")
        return file.read(file.size, 0)


def _open(path: str, name: str, more_flags: int) -> io.FileIO:
    try:
        return io.FileIO(path, "r", opener=lambda path, flags: os.open(path, flags | more_flags))
    except IsADirectoryError:
        raise Refused(f"{name} is no regular file") from None
    except OSError as error:
        # a link, where none is followed
        if error.errno == errno.ELOOP:
            raise Refused(f"{name} is no regular file") from None
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


class _Buffer:
    def __init__(self, nbytes: int) -> None:
        # whole huge pages, or the kernel may place the buffer where none fits
        self.capacity = capacity = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
        # takes no memory before it is written
        self._memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._used = 0
        self._references = sys.getrefcount(self._memory)

    @property
    def is_kept(self) -> bool:
        """True while a tensor lies in the buffer: its storage holds a reference."""
        return sys.getrefcount(self._memory) > self._references

    def take(self, nbytes: int) -> torch.Tensor:
        self._used = nbytes
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes)

    def give_back(self) -> None:
        """Return all memory without a tensor to the system."""
        used = self._used if self.is_kept else 0
        start = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        _madvise(address + start, max(0, self.capacity - start), mmap.MADV_DONTNEED)


class ReadBuffers:
    """Buffers for repeated use, unless somebody still holds a tensor in them.

    The kernel zeroes new memory page by page, in as much time as the reading takes. Used memory
    avoids this. Three buffers take turns: one is being read into, one is with the loader, and the
    loader may still hold the last tensor of a third. Some loaders gather tensors, to fuse or to
    sort them. Their buffers stay, and other tensors are read elsewhere. Loaders copy to a device:
    the copy has left the buffer when it returns.

    Only the staging thread takes buffers. Another thread reads into a buffer, and that reading
    keeps the buffer.
    """

    def __init__(self, largest: int) -> None:
        """``largest`` is the most bytes of one ``take``."""
        self._capacity = max(1, largest)
        self._buffers: list[_Buffer] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` unused bytes, one or more."""
        for buffer in self._buffers:
            if buffer.capacity >= nbytes and not buffer.is_kept:
                return buffer.take(nbytes)
        # the holder of a tensor frees the buffer
        buffer = _Buffer(self._capacity if len(self._buffers) < _MOST_BUFFERS else nbytes)
        self._buffers = [*self._buffers[1 - _MOST_BUFFERS :], buffer]
        return buffer.take(nbytes)

    def give_back(self) -> None:
        """Free all buffers. Torch would do so with the last tensor, holding the interpreter."""
        for buffer in self._buffers:
            buffer.give_back()
        self._buffers = []

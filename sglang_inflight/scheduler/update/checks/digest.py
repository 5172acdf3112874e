"""A checksum of weights, to compare ranks and runs."""

from __future__ import annotations

import hashlib
import os
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import xxhash

from sglang_inflight.threads import start_thread
from sglang_inflight.vocabulary.errors import Refused

CHUNK_BYTES = 8 << 20
# threads per rank: more would wait for the bus, or for the host's memory
MOST_READERS = 4


class Digest:
    """A hash over names, shapes, dtypes and bytes of weights."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256()
        self._reader = _Reader()

    def read(
        self, name: str, tensor: torch.Tensor, pieces: Iterable[torch.Tensor] | None = None
    ) -> Iterator[torch.Tensor]:
        """Read ``tensor``, and yield each of its pieces, flat, as soon as it is read.

        ``pieces``: elements to read in place of those of ``tensor``, flat, in its order.
        """
        one = _OfOne(name, tensor)
        yield from one.read(self._reader, pieces)
        self.add(one.line)

    def add(self, line: str) -> None:
        """Add a tensor read elsewhere, after the tensors added before."""
        self._whole.update(line.encode())

    def hexdigest(self) -> str:
        """Return 16 hex digits."""
        return self._whole.hexdigest()[:16]


def chunks_of(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the pieces in which a digest reads ``flat``."""
    return torch.split(flat, max(1, CHUNK_BYTES // flat.element_size()))


def digest_of(
    weights: Sequence[tuple[str, torch.Tensor]],
    check: Callable[[], None],
    readers: int = MOST_READERS,
) -> str:
    """Return the hex digest of ``weights`` in their order, read by ``readers`` threads.

    Requests wait for these weights. Readers hold the interpreter between two pieces only, and
    there are no more readers than cores. ``check`` is called between two pieces, and raises to
    give up.

    Nothing may write ``weights`` before the return. The current stream is waited for before the
    first reader begins, and the caller's thread leaves after the last reader. So no lock is
    needed. A reader owns the tensors it takes from ``left``, whose ``popleft`` is atomic, and
    their lines.
    """
    device = weights[0][1].device if weights else torch.device("cpu")
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()
    parts = [_OfOne(name, tensor) for name, tensor in weights]
    # largest first: no reader begins a large tensor when the others are done
    left = deque(sorted(parts, key=lambda part: -part.tensor.nbytes))
    failures: list[BaseException] = []
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def read() -> None:
        reader = _Reader()
        try:
            while (part := _taken_from(left)) is not None:
                for _ in part.read(reader):
                    check()
        except BaseException as error:
            failures.append(error)
            left.clear()

    def read_beside() -> None:
        try:
            with _on_a_stream_of(device):
                read()
        finally:
            ended.put(None)

    helpers = 0
    readers = min(readers, len(os.sched_getaffinity(0)))
    try:
        for _ in range(min(readers, len(parts)) - 1):
            start_thread(read_beside, name="inflight-digest")
            helpers += 1
    except Refused:
        # no memory for another thread: the existing ones read all
        pass
    read()
    for _ in range(helpers):
        ended.get()
    if failures:
        raise failures[0]
    digest = Digest()
    for part in parts:
        digest.add(part.line)
    return digest.hexdigest()


def _taken_from(left: deque[_OfOne]) -> _OfOne | None:
    try:
        return left.popleft()
    except IndexError:
        return None


def _on_a_stream_of(device: torch.device) -> AbstractContextManager[object]:
    """Return a context with a new stream on ``device``.

    A thread's copies must not wait for another thread's, nor touch another device.
    """
    if device.type == "cpu":
        return nullcontext()
    module = torch.get_device_module(device)
    stream: AbstractContextManager[object] = module.stream(module.Stream(device))
    return stream


class _OfOne:
    """One tensor's part of a digest."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name = name
        self.tensor = tensor
        self._checksum = xxhash.xxh3_64()

    def read(
        self, reader: _Reader, pieces: Iterable[torch.Tensor] | None = None
    ) -> Iterator[torch.Tensor]:
        if pieces is None:
            pieces = chunks_of(self.tensor.detach().contiguous().view(-1))
        for chunk in pieces:
            self._checksum.update(reader.bytes_of(chunk))
            yield chunk

    @property
    def line(self) -> str:
        shape, dtype = list(self.tensor.shape), self.tensor.dtype
        return f"{self._name} {shape} {dtype} {self._checksum.hexdigest()}\n"


class _Reader:
    """Brings device memory to the host, through one piece of pinned memory. For one thread."""

    def __init__(self) -> None:
        self._pinned: torch.Tensor | None = None

    def bytes_of(self, chunk: torch.Tensor) -> memoryview:
        """Return the bytes of ``chunk``, valid until the next call."""
        there = chunk.view(torch.uint8)
        if there.device.type == "cpu":
            return memoryview(there.numpy().data)
        if self._pinned is None:
            self._pinned = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        here = self._pinned[: len(there)]
        here.copy_(there)
        return memoryview(here.numpy().data)

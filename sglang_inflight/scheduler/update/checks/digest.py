"""A checksum of weights, to compare what ranks and runs serve."""

from __future__ import annotations

import hashlib
import os
import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import xxhash

from sglang_inflight.errors import Refused
from sglang_inflight.threads import start_thread

CHUNK_BYTES = 8 << 20
# by rank: more of them wait for the bus, or for the host's memory
MOST_READERS = 4


class Digest:
    """Over names, shapes, dtypes and bytes of the weights that were read through it."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256()
        self._reader = _Reader()

    def read(self, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Read ``tensor``, and hand on each piece of it, flat, as soon as it is read."""
        one = _OfOne(name, tensor)
        yield from one.read(self._reader)
        self.add(one.line)

    def add(self, line: str) -> None:
        """A tensor that was read already, after those that were added before."""
        self._whole.update(line.encode())

    def hexdigest(self) -> str:
        """16 hex digits."""
        return self._whole.hexdigest()[:16]


def digest_of(
    weights: Sequence[tuple[str, torch.Tensor]],
    check: Callable[[], None],
    readers: int = MOST_READERS,
) -> str:
    """The hex digest of ``weights`` in their order, read by ``readers`` threads.

    For weights that requests wait for. Readers hold the interpreter between two pieces only, and
    there are no more of them than cores. ``check`` is called between two pieces, and raises to
    give up.

    Nothing may write ``weights`` until it returns. What was written on the current stream is
    waited for before the first reader begins, and the caller's thread leaves only when all
    readers have: so no lock is needed. A reader owns the tensors that it takes from ``left``,
    whose ``popleft`` is atomic, and the lines of these.
    """
    device = weights[0][1].device if weights else torch.device("cpu")
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()
    parts = [_OfOne(name, tensor) for name, tensor in weights]
    # the largest first: none of them is begun when the others are done
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
        # no memory for a thread: those that there are read all
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
    """A thread's copies are not to wait for those of another, nor to touch another device."""
    if device.type == "cpu":
        return nullcontext()
    module = torch.get_device_module(device)
    stream: AbstractContextManager[object] = module.stream(module.Stream(device))
    return stream


class _OfOne:
    """The part of a digest that is one tensor's."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name = name
        self.tensor = tensor
        self._checksum = xxhash.xxh3_64()

    def read(self, reader: _Reader) -> Iterator[torch.Tensor]:
        flat = self.tensor.detach().contiguous().view(-1)
        for chunk in torch.split(flat, max(1, CHUNK_BYTES // flat.element_size())):
            self._checksum.update(reader.bytes_of(chunk))
            yield chunk

    @property
    def line(self) -> str:
        shape, dtype = list(self.tensor.shape), self.tensor.dtype
        return f"{self._name} {shape} {dtype} {self._checksum.hexdigest()}\n"


class _Reader:
    """Brings a device's memory to the host, through one piece of pinned memory. Of one thread."""

    def __init__(self) -> None:
        self._pinned: torch.Tensor | None = None

    def bytes_of(self, chunk: torch.Tensor) -> memoryview:
        """Until the next call."""
        there = chunk.view(torch.uint8)
        if there.device.type == "cpu":
            return memoryview(there.numpy().data)
        if self._pinned is None:
            self._pinned = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        here = self._pinned[: len(there)]
        here.copy_(there)
        return memoryview(here.numpy().data)

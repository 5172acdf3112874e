"""Digests of tensors, the same at a trainer and on a rank. Imports no SGLang.

A tensor's digest is over its name, shape, dtype and bytes: another sign of zero and another payload
of NaN change it. ``digest_of_all`` combines digests independent of their order. A digest has 64
bits, so it finds accidents, and proves nothing against somebody who wants two equal ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 8 << 20
_DIGITS = 16


def digest(tensor: torch.Tensor, name: str) -> str:
    """Return the digest of ``tensor`` under ``name``, 16 hex digits.

    ``tensor`` may have any shape, dtype and layout of memory, on any device. On a device it is read
    through pinned memory, piece by piece, on the current stream. The call waits for that stream,
    and for no other one.
    """
    return _digest(name, tensor, HostReader())


def digests(
    named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> dict[str, str]:
    """Return each tensor's ``digest`` by its name, for ``expected_digests`` of an update.

    Raises ``ValueError`` if a name comes twice.
    """
    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    found: dict[str, str] = {}
    reader = HostReader()
    for name, tensor in pairs:
        if name in found:
            raise ValueError(f"{name!r} comes twice")
        found[name] = _digest(name, tensor, reader)
    return found


def digest_of_all(digests: Iterable[str]) -> str:
    """Return the digest of all tensors with these ``digests``, in any order: 16 hex digits.

    It is the sum of the digests, modulo 2^64. So a trainer's processes may add up their parts.
    """
    return f"{sum(int(one, 16) for one in digests) % (1 << 64):016x}"


class Digest:
    """A digest over names, shapes, dtypes and bytes of tensors in their order."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256()
        self._reader = HostReader()

    def read(self, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Read ``tensor``, and yield each of its pieces, flat, as soon as it is read."""
        one = TensorDigest(name, tensor)
        yield from one.read(self._reader)
        self.add(one.line)

    def add(self, line: str) -> None:
        """Add a tensor read elsewhere, after the tensors added before."""
        self._whole.update(line.encode())

    def hexdigest(self) -> str:
        """Return 16 hex digits."""
        return self._whole.hexdigest()[:_DIGITS]


class TensorDigest:
    """One tensor's part of a digest. ``line`` describes the pieces read so far."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        import xxhash

        self._name = name
        self.tensor = tensor
        self._checksum = xxhash.xxh3_64()

    def read(
        self, reader: HostReader, pieces: Iterable[torch.Tensor] | None = None
    ) -> Iterator[torch.Tensor]:
        """Read the tensor, or ``pieces`` in its place; yield each piece, flat, once it is read."""
        if pieces is None:
            pieces = flat_pieces(self.tensor)
        for chunk in pieces:
            self._checksum.update(reader.bytes_of(chunk))
            yield chunk

    @property
    def line(self) -> str:
        shape, dtype = list(self.tensor.shape), self.tensor.dtype
        return f"{self._name} {shape} {dtype} {self._checksum.hexdigest()}\n"

    def hexdigest(self) -> str:
        """Return the digest of this tensor alone, 16 hex digits."""
        return hashlib.sha256(self.line.encode()).hexdigest()[:_DIGITS]


class HostReader:
    """Brings device memory to the host, through one piece of pinned memory. For one thread.

    A copy runs on the thread's current stream, and the thread waits for that stream alone.
    """

    def __init__(self) -> None:
        self._pinned: torch.Tensor | None = None

    def bytes_of(self, chunk: torch.Tensor) -> memoryview:
        """Return the bytes of ``chunk``, valid until the next call."""
        import torch

        there = chunk.view(torch.uint8)
        if there.device.type == "cpu":
            return memoryview(there.numpy().data)
        if self._pinned is None:
            self._pinned = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        here = self._pinned[: len(there)]
        here.copy_(there)
        return memoryview(here.numpy().data)


def flat_pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the pieces in which a digest reads ``tensor``, flat, in its elements' order."""
    return chunks_of(tensor.detach().contiguous().view(-1))


def chunks_of(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the pieces in which a digest reads ``flat``."""
    return flat.split(max(1, CHUNK_BYTES // flat.element_size()))


def _digest(name: str, tensor: torch.Tensor, reader: HostReader) -> str:
    one = TensorDigest(name, tensor)
    for _ in one.read(reader):
        pass
    return one.hexdigest()

"""Tensors between a source and a model's loader, in batches, one for each call.

Most loaders write a tensor before they ask for the next. Some gather all tensors of a call and
write them in another order. Some hold one half of a fused parameter until the other half comes.
Both forget held tensors at the end of the call. So a call must end before the sender writes to its
memory again, and must not end within a module.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import lru_cache

import torch

# Names and tensors, on the staging thread. A tensor may be the caller's memory.
Weights = Generator[tuple[str, torch.Tensor], None, None]

# A source's tensors in batches. A request for the next batch returns this batch's memory to the
# sender.
Batches = Generator[Weights, None, None]
_Pair = tuple[str, torch.Tensor]

# Bytes copied at a time, not counting the rest of a module.
MOST_BYTES = 512 << 20


def one_batch(weights: Weights) -> Batches:
    """Yield all of ``weights`` for one call: they stay readable to the end."""
    with closing(weights):
        yield weights


def with_whole_modules(batches: Batches) -> Batches:
    """Yield ``batches``, with the last module of each moved to the next batch.

    Use it for batches in one buffer. Senders fill the buffer and list modules one after the other,
    so its end may part the halves of a fused parameter. Moved tensors are copied, because the
    sender fills the buffer again. A module with more than ``MOST_BYTES`` so far is not moved.
    """
    begun: list[_Pair] = []
    with closing(batches):
        for batch in batches:
            pairs = [*begun, *batch]
            end = _begin_of_last_module(pairs)
            begun = [(name, _copied(tensor)) for name, tensor in pairs[end:]]
            del pairs[end:], batch
            if pairs:
                yield (pair for pair in pairs)
            # release the sender's memory
            pairs.clear()
    if begun:
        yield (pair for pair in begun)


def _begin_of_last_module(pairs: list[_Pair]) -> int:
    """Return the last module's index in ``pairs``, or their length if it is too large to move."""
    begin, nbytes = len(pairs), 0
    while begin and _module_of(pairs[begin - 1][0]) == _module_of(pairs[-1][0]):
        begin -= 1
        nbytes += _nbytes(pairs[begin][1])
    return begin if nbytes <= MOST_BYTES else len(pairs)


def in_parts(batch: Weights, most: float = MOST_BYTES) -> Iterator[list[_Pair]]:
    """Yield copies of the tensors of ``batch`` in lists for several calls; at least one list.

    A list has ``most`` bytes, and the rest of the module in which they end.
    """
    part: list[_Pair] = []
    nbytes = 0
    for name, tensor in batch:
        if nbytes >= most and _module_of(name) != _module_of(part[-1][0]):
            yield part
            part, nbytes = [], 0
        part.append((name, _copied(tensor)))
        nbytes += _nbytes(tensor)
    yield part


def _module_of(name: object) -> str:
    """Return the module around a tensor's fused parameter: ``a.b`` of ``a.b.c.weight``.

    A sender's name may not be a text: the loader's checks refuse it later.
    """
    return str(name).rpartition(".")[0].rpartition(".")[0]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    # a payload may hold something else: the loader's checks refuse it later
    return tensor.clone() if isinstance(tensor, torch.Tensor) else tensor


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if isinstance(tensor, torch.Tensor) else 0


class Packed:
    """Tensors side by side in one buffer of bytes.

    A view costs one call of torch where the buffer is a row of bytes, and the tensor begins at an
    element. Slicing, and viewing by dtype and by shape, cost three.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        is_row = buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous()
        self._length = len(buffer) if is_row else 0
        # the buffer by dtypes
        self._rows: dict[torch.dtype, torch.Tensor] = {}

    def view(self, start: int, end: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor in ``buffer[start:end]``.

        Raises ``RuntimeError`` if the tensor has another size, or begins within an element.
        """
        size = dtype.itemsize
        fits = end - start == math.prod(shape) * size and 0 <= start <= end <= self._length
        if not fits or start % size:
            return self._buffer[start:end].view(dtype).reshape(shape)
        row = self.row(dtype)
        strides = _strides(tuple(shape))
        return row.as_strided(shape, strides, row.storage_offset() + start // size)

    def row(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer, a row of bytes, in another dtype: as many elements as it has whole."""
        if (row := self._rows.get(dtype)) is None:
            whole = self._length // dtype.itemsize * dtype.itemsize
            row = self._rows[dtype] = self._buffer[:whole].view(dtype)
        return row

    def view_or_copy(
        self, start: int, end: int, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        """Do as ``view``, but return a copy of a tensor that begins within an element."""
        if start % dtype.itemsize:
            return self._buffer[start:end].clone().view(dtype).reshape(shape)
        return self.view(start, end, dtype, shape)


@lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))

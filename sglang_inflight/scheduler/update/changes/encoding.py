"""The changed elements of a weight, in a few bytes each.

A weight is seen as its memory: ``numel`` elements in a row, as integers of the element's width. So
NaN payloads and the sign of zero count, and fused, transposed and sharded weights need no code.

A changed element costs its value and a 16-bit offset within a block of 65,536 elements: 4 bytes in
bfloat16. Above the share of elements where that costs more than the values alone, the values of
the whole range are kept instead (half of them in bfloat16).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

BLOCK = 1 << 16
# elements compared in one go: 16 blocks. Comparing needs some 10 bytes an element meanwhile.
PIECE = 16 * BLOCK

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
OFFSET_BYTES = 2


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of ``tensor``, which has no holes, as a row of integers."""
    memory = tensor.data.as_strided((tensor.numel(),), (1,))
    return memory.view(_BITS[tensor.element_size()])


def as_integers(view: torch.Tensor) -> torch.Tensor:
    """Return the bits of ``view``, of any strides; those of a complex number are two."""
    if view.is_complex():
        view = torch.view_as_real(view)
    return view.view(_BITS[view.element_size()])


def has_bits(tensor: torch.Tensor) -> bool:
    """Return whether ``bits_of`` knows integers as wide as the elements of ``tensor``."""
    return tensor.element_size() in _BITS


@dataclass(slots=True)
class Part:
    """Changed elements in a range of a weight's memory.

    ``start``, ``length``: the range, in elements; at most ``PIECE``. ``values``: integers of the
    element's width. ``offsets``: uint16, the position of each value in its block, counted from
    ``start``, in ascending order; None if ``values`` has the whole range. ``counts``: int64, how
    many values each block has; None as well. ``changed``: how many of the values differ from what
    is served while the update is staged.

    An exchange writes ``values`` and nothing else.
    """

    start: int
    length: int
    values: torch.Tensor
    offsets: torch.Tensor | None = None
    counts: np.ndarray | None = None
    changed: int = 0

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    @property
    def block_counts(self) -> np.ndarray:
        """How many values each block has, int64."""
        return _full_blocks(self.length) if self.counts is None else self.counts

    def overlaps(self, start: int, end: int) -> bool:
        """Return whether its range and that from ``start`` to ``end`` have an element in common."""
        return self.start < end and self.start + self.length > start

    def move_to_host(self) -> None:
        """Move the part into pinned memory of the host, which a device's kernel reads in place."""
        self.values = self.values.cpu().pin_memory()
        if self.offsets is not None:
            self.offsets = self.offsets.cpu().pin_memory()

    def is_readable_on(self, device: torch.device) -> bool:
        """Return whether a kernel of ``device`` may read and write the part."""
        parts = [self.values] if self.offsets is None else [self.values, self.offsets]
        return all(one.device == device or one.is_pinned() for one in parts)

    def positions(self) -> torch.Tensor:
        """Return the int64 position of each value, counted from ``start``."""
        if self.offsets is None:
            return torch.arange(self.length, device=self.values.device)
        at = torch.empty(len(self.offsets), dtype=torch.int64, device=self.offsets.device)
        write_positions(self, at)
        return at


Changes = Sequence[tuple[torch.Tensor, list[Part]]]
"""Each changed weight with its parts. No element is in two parts."""


def write_positions(part: Part, at: torch.Tensor) -> None:
    """Write the positions of ``part``, which has offsets, into ``at`` (int64), without memory."""
    assert part.offsets is not None
    assert part.counts is not None
    at.copy_(part.offsets)
    begin = 0
    for block, count in enumerate(part.counts.tolist()):
        if block and count:
            at[begin : begin + count].add_(block * BLOCK)
        begin += count


def encode(start: int, length: int, at: torch.Tensor, values: torch.Tensor) -> Part:
    """Return the part with ``values`` at the ascending int64 positions ``at``."""
    blocks = -(-length // BLOCK)
    counts = torch.bincount(at >> 16, minlength=blocks).cpu().numpy()
    offsets = (at & (BLOCK - 1)).to(torch.uint16)
    return Part(start, length, values, offsets, counts, len(values))


def parts_at(at: torch.Tensor, values: torch.Tensor, numel: int) -> Iterator[Part]:
    """Yield parts with ``values`` at the ascending int64 positions ``at`` of a weight.

    ``numel``: elements of the weight.
    """
    found, counts = torch.unique_consecutive(at // PIECE, return_counts=True)
    sizes = counts.tolist()
    runs = zip(found.tolist(), at.split(sizes), values.split(sizes), strict=True)
    for piece, some, own in runs:
        start = piece * PIECE
        yield encode(start, min(PIECE, numel - start), some - start, own.clone())


@functools.lru_cache(maxsize=64)
def _full_blocks(length: int) -> np.ndarray:
    """Return the sizes of the blocks of a whole range, int64."""
    return np.minimum(BLOCK, length - np.arange(0, length, BLOCK))


def find_changes(
    start: int, live: torch.Tensor, new: torch.Tensor, written: torch.Tensor | None = None
) -> Part | None:
    """Return where ``new`` differs from ``live``, or None if nowhere.

    Both are rows of at most ``PIECE`` integers, from position ``start`` on. ``written``: booleans,
    False where ``new`` has no value of its own.
    """
    # on a CPU four times as fast as ``ne``
    differs = (new ^ live).bool()
    if written is not None:
        differs &= written
    at = positions_in(differs)
    if not len(at):
        return None
    width = new.element_size()
    # the values of a whole range would make the rest of it look written
    is_whole = written is None or bool(written.all())
    if is_whole and len(at) * (width + OFFSET_BYTES) >= len(new) * width:
        return Part(start, len(new), new.clone(), changed=len(at))
    return encode(start, len(new), at, new[at])


def positions_in(mask: torch.Tensor) -> torch.Tensor:
    """Return the ascending int64 positions at which ``mask``, a row of booleans, is True."""
    if mask.device.type == "cpu":
        # several times as fast as torch's
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().view(-1)


def count_changes(part: Part, live: torch.Tensor) -> int:
    """Return how many elements of ``live``, which is as served, an exchange would change."""
    if part.offsets is not None:
        return len(part.values)
    served = bits_of(live)[part.start : part.start + part.length]
    return int(part.values.to(served.device).ne(served).count_nonzero())


def without_range(part: Part, start: int, end: int) -> list[Part]:
    """Return ``part`` without its values in the range from ``start`` to ``end``."""
    first, last = start - part.start, end - part.start
    if part.offsets is not None:
        at = part.positions()
        return _at_pinned(part, _only(part, at, (at < first) | (at >= last)))
    rest = []
    if first > 0:
        rest.append(Part(part.start, first, part.values[:first].clone()))
    if last < part.length:
        rest.append(Part(part.start + last, part.length - last, part.values[last:].clone()))
    return _at_pinned(part, rest)


def without_positions(part: Part, positions: torch.Tensor, live: torch.Tensor) -> list[Part]:
    """Return ``part`` without its values at ``positions``, int64, in ``live`` as it is served."""
    at = part.positions()
    keeps = ~torch.isin(at + part.start, positions.to(at.device))
    if part.offsets is None:
        served = bits_of(live)[part.start : part.start + part.length].to(at.device)
        keeps &= part.values != served
    return _at_pinned(part, _only(part, at, keeps))


def _only(part: Part, at: torch.Tensor, keeps: torch.Tensor) -> list[Part]:
    if not bool(keeps.any()):
        return []
    return [encode(part.start, part.length, at[keeps], part.values[keeps])]


def _at_pinned(part: Part, rest: list[Part]) -> list[Part]:
    """Pin ``rest`` if ``part`` is: indexing does not give pinned memory."""
    if part.values.is_pinned():
        for one in rest:
            one.move_to_host()
    return rest


def put_into(part: Part, memory: torch.Tensor, start: int = 0) -> None:
    """Write the values of ``part`` into ``memory``, a row of integers from ``start`` on.

    Positions outside of ``memory`` are left out. ``memory`` may be on another device.
    """
    if part.offsets is None:
        first, last = max(part.start, start), min(part.start + part.length, start + len(memory))
        if first < last:
            here = part.values[first - part.start : last - part.start]
            memory[first - start : last - start].copy_(here)
        return
    if memory.device.type == "cpu":
        # the part's device may have no memory for positions
        part = replace(part, values=part.values.cpu(), offsets=part.offsets.cpu())
    at = part.positions() + (part.start - start)
    values = part.values
    if part.start < start or part.start + part.length > start + len(memory):
        inside = (at >= 0) & (at < len(memory))
        at, values = at[inside], values[inside]
    memory.index_copy_(0, at.to(memory.device), values.to(memory.device))

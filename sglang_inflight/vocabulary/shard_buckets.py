"""Buckets: what one rank of a trainer sends to one rank of a server, in pieces of memory.

Both sides derive the same buckets from what the trainer has and the server's rank uses. So a bucket
goes without a word about its content. Of changed elements both know how many there are, too: the
call says it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang_inflight.vocabulary.regions import Region
from sglang_inflight.vocabulary.shards import Held
from sglang_inflight.vocabulary.sparse import INDICES, VALUES, index_dtype
from sglang_inflight.vocabulary.transfers import Part, Transfers

if TYPE_CHECKING:
    import torch

# a number for the rules by which buckets are cut: both sides must have the same
FORMAT = 2

# tensors of which elements have changed, each by its place in the order of all, and how many
Counts = Sequence[tuple[int, int]]

# pieces begin at multiples of it, so that each is a tensor of its dtype where it lies
_ALIGNED = 16


class Piece(NamedTuple):
    """A region of a tensor, from the byte ``start`` of its bucket to ``end``."""

    name: str
    region: Region
    dtype: torch.dtype
    start: int
    end: int

    def view(self, row: torch.Tensor) -> torch.Tensor:
        """Return the piece in ``row``, the bytes of its bucket."""
        return row[self.start : self.end].view(self.dtype).view(self.region.sizes)


class Bucket(NamedTuple):
    """Pieces for one rank. ``first``: the place of its first tensor in the order of all."""

    source: int
    first: int
    pieces: list[Piece]

    @property
    def nbytes(self) -> int:
        return self.pieces[-1].end


class Dealing:
    """Deals out the tensors of one layout of a trainer.

    ``names``: all tensors, each where a rank of the trainer first has it.
    """

    def __init__(self, held: Sequence[Mapping[str, Held]]) -> None:
        """``held``: of each rank of the trainer. Raises ``ValueError`` if two ranks differ."""
        self.kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for rank, tensors in enumerate(held):
            for name, (dtype, shape, _) in tensors.items():
                kind = dtype_of(dtype), shape
                if self.kinds.setdefault(name, kind) != kind:
                    raise ValueError(
                        f"rank {rank} of the trainer has {name!r} as {dtype} of shape "
                        f"{list(shape)}, and a rank before it as {self.kinds[name]}"
                    )
        self.names = [*self.kinds]
        regions = [{name: each.regions for name, each in rank.items()} for rank in held]
        self._senders = len(held)
        self._transfers = Transfers(regions, self.names)

    def buckets(
        self, sender: int, receiver: int, wanted: Mapping[str, Region], most: int
    ) -> list[Bucket]:
        """Return what ``sender`` sends to ``receiver``, in order.

        ``wanted``: what the receiver uses. A bucket has ``most`` bytes, or one piece. Raises
        ``NotHeld``, and ``ValueError`` for a region beyond its tensor.
        """
        filled = _Filled(sender, most)
        for at, part, dtype in self._parts(receiver, wanted):
            if part.source == sender:
                filled.add(at, self.names[at], part.region, dtype)
        return filled.buckets

    def for_receiver(self, receiver: int, wanted: Mapping[str, Region], most: int) -> list[Bucket]:
        """Return the buckets of all senders, in the order in which ``receiver`` takes them."""
        of_senders: dict[int, _Filled] = {}
        for at, part, dtype in self._parts(receiver, wanted):
            if part.source not in of_senders:
                of_senders[part.source] = _Filled(part.source, most)
            of_senders[part.source].add(at, self.names[at], part.region, dtype)
        return _in_turn(of_senders[sender] for sender in sorted(of_senders))

    def changed(
        self, counts: Sequence[Counts], wanted: Mapping[str, Region], most: int
    ) -> tuple[dict[str, Region], list[Bucket]]:
        """Return the changed elements as rows, and the buckets with them, in the receiver's order.

        ``counts``: what each sender has for this receiver. ``wanted``: what that uses.

        The rows of the tensor NAME are ``NAME.indices`` and ``NAME.values``. Of each row a sender
        brings a stretch, behind those of the senders before it. A bucket has ``most`` bytes, or
        one stretch. Raises ``ValueError`` for counts that cannot be.
        """
        if len(counts) != self._senders:
            raise ValueError(f"{self._senders} ranks of the trainer send, and {len(counts)} count")
        totals: dict[str, int] = {}
        of_senders: list[_Filled] = []
        for source, of_sender in enumerate(counts):
            filled, last = _Filled(source, most), -1
            for at, count in of_sender:
                if not last < at < len(self.names) or count < 1:
                    raise ValueError(f"rank {source} of the trainer sends {count} of tensor {at}")
                last, name = at, self.names[at]
                dtype, shape = self.kinds[name]
                start = totals.get(name, 0)
                totals[name] = start + count
                if name not in wanted or totals[name] > wanted[name].numel:
                    raise ValueError(
                        f"of {name!r} more elements have changed than the receiver uses"
                    )
                stretch = Region((start,), (count,))
                filled.add(at, name + INDICES, stretch, index_dtype(math.prod(shape)))
                filled.add(at, name + VALUES, stretch, dtype)
            of_senders.append(filled)
        rows = {
            name + half: Region.whole((total,))
            for name, total in totals.items()
            for half in (INDICES, VALUES)
        }
        return rows, _in_turn(of_senders)

    def _parts(
        self, receiver: int, wanted: Mapping[str, Region]
    ) -> Iterator[tuple[int, Part, torch.dtype]]:
        for at, name in enumerate(self.names):
            if (region := wanted.get(name)) is None:
                continue
            dtype, shape = self.kinds[name]
            if not region.is_within(shape):
                raise ValueError(
                    f"{name!r} has the shape {list(shape)} here, and rank {receiver} of the "
                    f"servers uses {region} of it"
                )
            for part in self._transfers.of_tensor(at, region, receiver):
                yield at, part, dtype


def _in_turn(of_senders: Iterable[_Filled]) -> list[Bucket]:
    """Return the buckets of all senders, in the order in which their receiver takes them."""
    found = [bucket for filled in of_senders for bucket in filled.buckets]
    # a sender's own order stays: ``first`` never falls in it
    return sorted(found, key=lambda bucket: (bucket.first, bucket.source))


class _Filled:
    """The buckets of one sender for one receiver. The last one is open."""

    def __init__(self, source: int, most: int) -> None:
        self.buckets: list[Bucket] = []
        self._source = source
        self._most = most

    def add(self, at: int, name: str, region: Region, dtype: torch.dtype) -> None:
        nbytes = region.numel * dtype.itemsize
        start = 0
        if self.buckets:
            start = -(-self.buckets[-1].nbytes // _ALIGNED) * _ALIGNED
        if not self.buckets or start + nbytes > self._most:
            start = 0
            self.buckets.append(Bucket(self._source, at, []))
        self.buckets[-1].pieces.append(Piece(name, region, dtype, start, start + nbytes))


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of this name. Raises ``ValueError`` for another name."""
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found

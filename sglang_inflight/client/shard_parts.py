"""The parts of a version that one rank of a trainer has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from sglang_inflight.vocabulary.errors import Refused
from sglang_inflight.vocabulary.regions import Region
from sglang_inflight.vocabulary.shard_buckets import Bucket
from sglang_inflight.vocabulary.shards import Held, Shards, write_shards

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


class Shard(NamedTuple):
    """A part of a tensor, as one rank of the trainer has it.

    ``tensor`` lies at ``starts`` in a tensor of ``shape``. All are in elements.
    """

    tensor: torch.Tensor
    starts: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def region(self) -> Region:
        return Region(tuple(self.starts), tuple(self.tensor.shape))


class Own:
    """Writes lines of what one rank of the trainer has, anew once it has something else.

    ``dtype``: the dtype in which floats of at least two bytes are sent; None: each in its own.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = None if dtype is None else _name_of(dtype)
        self._held: list[tuple[str, Held]] = []
        self._lines = write_shards(self._held)

    def lines_of(self, shards: Mapping[str, Shard]) -> Shards:
        held = [(name, self._held_of(shard)) for name, shard in shards.items()]
        if held != self._held:
            self._held, self._lines = held, write_shards(held)
        return self._lines

    def _held_of(self, shard: Shard) -> Held:
        tensor = shard.tensor
        is_cast = self._dtype is not None and tensor.is_floating_point() and tensor.itemsize > 1
        dtype = self._dtype if is_cast else _name_of(tensor.dtype)
        assert dtype is not None
        return Held(dtype, tuple(shard.shape), (shard.region,) if tensor.numel() else ())


def shard_of(named: tuple[str, torch.Tensor | Shard]) -> tuple[str, Shard]:
    """Return what this rank has of a tensor.

    Raises ``Refused`` for a ``DTensor`` to be reduced, and for one whose part is no single region.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    name, tensor = named
    if isinstance(tensor, Shard):
        return name, tensor
    if not isinstance(tensor, DTensor):
        return name, Shard(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))
    if any(placement.is_partial() for placement in tensor.placements):
        raise Refused(f"{name!r} is a sum that its ranks have not made yet: {tensor.placements}")
    if _lies_apart(tensor):
        raise Refused(
            f"{name!r} lies apart on each rank, in several regions: {tensor.placements}. "
            "Redistribute it first"
        )
    _, starts = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return name, Shard(tensor.to_local().detach(), tuple(starts), tuple(tensor.shape))


def _lies_apart(tensor: DTensor) -> bool:
    """Return whether a rank's part is several regions.

    A strided shard is one region where as many shards of its dimension follow as its factor says,
    as in FSDP2 over tensor parallel. A view of heads may leave one that nothing follows.
    """
    from torch.distributed.tensor.placement_types import Shard as Sharded
    from torch.distributed.tensor.placement_types import _StridedShard

    for at, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):
            following = math.prod(
                tensor.device_mesh.size(behind)
                for behind, other in enumerate(tensor.placements)
                if behind > at
                and isinstance(other, Sharded | _StridedShard)
                and other.dim == placement.dim
            )
            if following != placement.split_factor:
                return True
    return False


def pack(bucket: Bucket, shards: Mapping[str, Shard]) -> torch.Tensor:
    """Return the bytes of ``bucket``, on the device of its first tensor."""
    import torch

    device = shards[bucket.pieces[0].name].tensor.device
    row = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
    for piece in bucket.pieces:
        shard = shards[piece.name]
        # a copy to another dtype is a cast
        piece.view(row).copy_(shard.tensor[piece.region.seen_from(shard.region).slices()])
    return row


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

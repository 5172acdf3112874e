"""A rank tells where its part of a ``DTensor`` lies, or refuses one that is not a single region."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from sglang_inflight.client.shard_parts import shard_of
from sglang_inflight.vocabulary.errors import Refused

ROWS = 8
Made = Callable[[tuple[int, ...], Sequence[Placement], int], DTensor]


@pytest.fixture
def made() -> Iterator[Made]:
    """Make a tensor of eight rows on a mesh, as this ``rank`` has it. Nothing is communicated."""

    def make(mesh: tuple[int, ...], placements: Sequence[Placement], rank: int) -> DTensor:
        size = torch.Size(mesh).numel()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        local = torch.zeros(ROWS // size, 2)
        shape, stride = torch.Size((ROWS, 2)), (2, 1)
        on = init_device_mesh("cpu", mesh)
        return DTensor.from_local(
            local, on, placements, run_check=False, shape=shape, stride=stride
        )

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(4))
def test_part_by_fsdp_over_tensor_parallel_is_elsewhere(made: Made, rank: int) -> None:
    """Tensor parallel cuts first, and FSDP2 cuts what a rank has of that."""
    tensor = made((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], rank)
    _, part = shard_of(("w", tensor))
    fsdp, tensor_parallel = divmod(rank, 2)
    assert part.starts == (tensor_parallel * ROWS // 2 + fsdp * ROWS // 4, 0)
    assert part.shape == (ROWS, 2)


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        # what is left of the rows of one head that was cut, seen as pairs and turned
        ((2,), [_StridedShard(0, split_factor=2)]),
        ((2, 2), [_StridedShard(0, split_factor=4), Shard(0)]),
        ((2, 1), [_StridedShard(0, split_factor=2), Replicate()]),
    ],
)
def test_rows_that_lie_apart_are_sent(
    made: Made, mesh: tuple[int, ...], placements: Sequence[Placement]
) -> None:
    with pytest.raises(Refused, match="'w' lies apart on each rank"):
        shard_of(("w", made(mesh, placements, 1)))

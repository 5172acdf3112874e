"""What the ranks of a replica decide together, because they step together.

All see the same control messages in the same pass of their loops. What they need not have in
common are their clocks, the requests of their attention DP group, and their own failures.
Each function is a collective over the replica's ranks on the host: all of them call it in the
same pass, on the scheduler's thread, which alone uses that group.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from sglang.srt.utils import broadcast_pyobj

from sglang_inflight.sglang_types.runtime_context import get_parallel

T = TypeVar("T")


def smallest(here: int) -> int:
    """Of what the ranks say."""
    group = get_parallel().tp_group
    if group.world_size == 1:
        return here
    said = torch.tensor([here])
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(said)


def is_true_of_any(here: bool) -> bool:
    """Whether any rank says so."""
    return smallest(int(not here)) == 0


def as_first_rank_says(here: list[T]) -> list[T]:
    """The first rank's list. What is in it must pickle."""
    group = get_parallel().tp_group
    if group.world_size == 1:
        return here
    said: list[T] = broadcast_pyobj(here, group.rank, group.cpu_group, src=group.ranks[0])
    return said


def as_first_rank_of_all_says(here: list[T]) -> list[T]:
    """As above, over all stages of a pipeline too."""
    group = get_parallel().world_group
    said: list[T] = broadcast_pyobj(here, group.rank, group.cpu_group, src=group.ranks[0])
    return said

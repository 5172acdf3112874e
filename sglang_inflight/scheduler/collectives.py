"""Collectives by which the ranks of a replica agree, because they step together.

All ranks see the same control messages in the same pass of their loops. Their clocks, their
failures and the requests of their attention DP groups may differ. Each function is a collective
over the replica's ranks on the host. All ranks call it in the same pass, on the scheduler's
thread. No other thread uses that group.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from sglang.srt.utils import broadcast_pyobj

from sglang_inflight.sglang_types import get_parallel

T = TypeVar("T")


def min_over_ranks(here: int) -> int:
    """Return the smallest of the ranks' values."""
    group = get_parallel().tp_group
    if group.world_size == 1:
        return here
    said = torch.tensor([here])
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(said)


def is_true_on_any_rank(here: bool) -> bool:
    """Return whether ``here`` is true on any rank."""
    return min_over_ranks(int(not here)) == 0


def broadcast_from_first_rank(here: list[T]) -> list[T]:
    """Return the first rank's list. Its items must pickle."""
    group = get_parallel().tp_group
    if group.world_size == 1:
        return here
    said: list[T] = broadcast_pyobj(here, group.rank, group.cpu_group, src=group.ranks[0])
    return said


def broadcast_from_first_rank_of_all(here: list[T]) -> list[T]:
    """Return the list of the first rank of all pipeline stages. Its items must pickle."""
    group = get_parallel().world_group
    said: list[T] = broadcast_pyobj(here, group.rank, group.cpu_group, src=group.ranks[0])
    return said

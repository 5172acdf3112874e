"""Ranks of a server: their names, their order, and this process's place among them.

SGLang orders ranks by replica, then by pipeline stage, then by tensor-parallel rank. Attention DP
has no replicas: it divides the tensor-parallel ranks of one model into groups, and a rank's
``dp_rank`` is its group.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_inflight.sglang_types import get_parallel


class Rank(NamedTuple):
    """The name of a rank in messages and errors."""

    # replica, or group of attention DP
    dp: int
    # pipeline stage
    pp: int
    tp: int

    def __str__(self) -> str:
        return f"rank dp{self.dp} pp{self.pp} tp{self.tp}"


def own_rank() -> Rank:
    parallel = get_parallel()
    dp_rank = parallel.attn_dp_rank if parallel.attn_dp_enabled else parallel.dp_rank or 0
    return Rank(dp_rank, parallel.pp_rank, parallel.tp_rank)


def all_ranks() -> frozenset[Rank]:
    """Return the ranks of all replicas."""
    parallel = get_parallel()
    stages, width = range(parallel.pp_size), range(parallel.tp_size)
    if parallel.attn_dp_enabled:
        group = parallel.tp_size // parallel.attn_dp_size
        return frozenset(Rank(tp // group, pp, tp) for pp in stages for tp in width)
    return frozenset(
        Rank(dp, pp, tp) for dp in range(parallel.dp_size) for pp in stages for tp in width
    )


def count_replicas() -> int:
    parallel = get_parallel()
    return 1 if parallel.attn_dp_enabled else parallel.dp_size


def own_replica() -> int:
    parallel = get_parallel()
    return 0 if parallel.attn_dp_enabled else parallel.dp_rank or 0


def own_index() -> int:
    """Return this rank's place in the order of all ranks."""
    parallel = get_parallel()
    stage: int = own_replica() * parallel.pp_size + parallel.pp_rank
    index: int = stage * parallel.tp_size + parallel.tp_rank
    return index


def is_first_of_replica() -> bool:
    """Return whether this rank is the first of its replica, or of its attention DP group."""
    parallel = get_parallel()
    return not any((parallel.pp_rank, parallel.attn_tp_rank, parallel.attn_cp_rank))


class Placement(NamedTuple):
    """The nodes of a server, as seen by one of its schedulers."""

    has_other_nodes: bool
    # whether this scheduler is on the front end's node
    is_with_front_end: bool


# set in an actor, because SGLang calls each of Ray's nodes the first
_on_ray: Placement | None = None


def set_placement_on_ray(placement: Placement) -> None:
    global _on_ray
    _on_ray = placement


def own_placement() -> Placement:
    if _on_ray is not None:
        return _on_ray
    parallel = get_parallel()
    return Placement(parallel.nnodes > 1, parallel.node_rank == 0)

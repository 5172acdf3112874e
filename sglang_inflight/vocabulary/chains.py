"""Chains: ranks of servers that use the same parts of tensors hand them on to each other.

The trainer sends to the first rank of a chain alone. So it sends each byte once, however many
servers there are. A bucket takes a hop to each further rank, and the hops of different buckets
overlap.

Every rank derives the chains from what the servers' ranks use, so no message says them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Place(NamedTuple):
    """A rank's place in its chain. All are ranks of the group.

    ``first``: the rank for which the buckets are cut. ``before``: the rank that hands them on to
    this one; None: the trainer sends them. ``after``: the next rank, if there is one.
    """

    first: int
    before: int | None
    after: int | None


def chains_of(wanted: Mapping[int, str], *, relays: bool) -> list[list[int]]:
    """Return the ranks of each chain, in the order in which buckets come.

    ``wanted``: what each rank of the servers uses, by its rank in the group. Without ``relays``
    each rank is a chain of its own.
    """
    if not relays:
        return [[rank] for rank in sorted(wanted)]
    chains: dict[str, list[int]] = {}
    for rank in sorted(wanted):
        chains.setdefault(wanted[rank], []).append(rank)
    return [*chains.values()]


def place_of(rank: int, chains: list[list[int]]) -> Place:
    """Return the place of ``rank`` in its chain. Raises ``ValueError`` for a rank of none."""
    for chain in chains:
        if rank in chain:
            at = chain.index(rank)
            after = chain[at + 1] if at + 1 < len(chain) else None
            return Place(chain[0], chain[at - 1] if at else None, after)
    raise ValueError(f"rank {rank} of the group is in no chain")

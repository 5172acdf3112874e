"""The changes of one rank's shards in a version, and the part of them that each receiver gets."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang_inflight.client.base import are_taken_sparse
from sglang_inflight.client.changes import Change, Snapshot
from sglang_inflight.client.shard_parts import Shard
from sglang_inflight.vocabulary.errors import Refused
from sglang_inflight.vocabulary.positions import are_within, in_whole
from sglang_inflight.vocabulary.regions import Region
from sglang_inflight.vocabulary.shard_buckets import Bucket
from sglang_inflight.vocabulary.sparse import index_dtype

if TYPE_CHECKING:
    import torch

# the dtype in which each tensor is sent, and the shape of all of it
Kinds = Mapping[str, tuple["torch.dtype", tuple[int, ...]]]


class Found(NamedTuple):
    """The changes of one rank in a version.

    ``changes``: by positions in whole tensors. ``whole``: the tensors that are to be sent whole.
    """

    changes: Mapping[str, Change]
    whole: Collection[str]


class Followed:
    """A copy of the shards that this rank has sent, in this machine's memory.

    A copy has a tag, the same on all ranks. It stands for the version that all of them have sent,
    and no rank has a tag from the begin of a version until all ranks have sent it.
    """

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._tag: str | None = None

    def note_sent(self, tag: str) -> None:
        """Note that all ranks have sent what this one has copied."""
        self._tag = tag

    def hold(self, shards: Mapping[str, Shard], kinds: Kinds) -> None:
        """Copy ``shards``, as they are sent, in place of all others."""
        self._tag = None
        self._snapshot.forget(self._snapshot.keys() - shards.keys())
        for name, shard in shards.items():
            self._snapshot.hold(name, shard.tensor.detach().to(kinds[name][0]))

    def follow(
        self, shards: Mapping[str, Shard], kinds: Kinds, whole: Collection[str], *, since: str
    ) -> Found:
        """Copy ``shards``, and return what has changed since the version with the tag ``since``.

        A tensor is sent whole if that is smaller for this rank, if servers take no sparse values of
        its dtype, or no such value, and if it is among ``whole``. Raises ``Refused`` if another
        version was copied.
        """
        if (tag := self._tag) != since:
            raise Refused(f"changes since {since!r} are wanted, and this rank has sent {tag!r}")
        self._tag = None
        changes: dict[str, Change] = {}
        to_be_whole = set[str]()
        for name, shard in shards.items():
            if not shard.tensor.numel():
                continue
            dtype, shape = kinds[name]
            change = self._snapshot.follow(name, shard.tensor.detach().to(dtype))
            if change is None or name in whole or not are_taken_sparse(change.values):
                to_be_whole.add(name)
            elif len(change.indices):
                at = in_whole(change.indices, shard.region, shape)
                changes[name] = Change(at.to(index_dtype(math.prod(shape))), change.values)
        return Found(changes, to_be_whole)


def cut_changes(
    changes: Mapping[str, Change], shards: Mapping[str, Shard], buckets: Iterable[Bucket]
) -> dict[str, Change]:
    """Return what lies in the pieces of ``buckets``: what one receiver gets from this rank.

    The pieces say which rank sends a receiver which element that it uses. So each changed one is
    sent by one rank, whatever replicas there are.
    """
    regions: dict[str, list[Region]] = {}
    for bucket in buckets:
        for piece in bucket.pieces:
            if piece.name in changes:
                regions.setdefault(piece.name, []).append(piece.region)
    cut = {name: _cut(changes[name], shards[name], of) for name, of in regions.items()}
    return {name: change for name, change in cut.items() if len(change.indices)}


def _cut(change: Change, shard: Shard, regions: Sequence[Region]) -> Change:
    if [*regions] == [shard.region]:
        return change
    at = change.indices
    inside = at.new_zeros(at.shape).bool()
    for region in regions:
        inside |= are_within(at, region, shard.shape)
    return Change(at[inside], change.values[inside])


def rows_of(
    cut: Mapping[str, Change], rows: Mapping[str, Region], buckets: Iterable[Bucket]
) -> dict[str, Shard]:
    """Return the stretches that this rank sends, as its shards of ``rows``.

    ``buckets``: its own ones, as ``Dealing.changed`` has derived them.
    """
    halves = dict(pair for name, change in cut.items() for pair in change.named(name))
    return {
        piece.name: Shard(halves[piece.name], piece.region.starts, rows[piece.name].sizes)
        for bucket in buckets
        for piece in bucket.pieces
    }

"""Receives the parts that a rank uses, from the ranks of a trainer that have them.

A call names what the trainer's ranks have, by digests. The rank knows what it uses. From both it
derives the buckets that come, from whom and in which order, and posts a receive for each in turn.
A tensor is handed on once all of its part has come.

No wait is circular: a rank takes each bucket in one order, waits for nothing else, and a sender
sends to each rank on its own. So the bucket that a rank waits for is the next one that its sender
has for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from sglang_inflight.extensions.shards.describing import Describing
from sglang_inflight.messages import PartsSource
from sglang_inflight.scheduler.groups.groups import Groups
from sglang_inflight.scheduler.update.sources.batches import Weights
from sglang_inflight.scheduler.update.sources.reading import WIRES
from sglang_inflight.vocabulary.errors import Refused
from sglang_inflight.vocabulary.regions import Region
from sglang_inflight.vocabulary.shard_buckets import Bucket, Dealing
from sglang_inflight.vocabulary.shards import Held, Shards, read_shards

NAME = "shards"


class Sent(msgspec.Struct, kw_only=True):
    """The body of a call: what the ranks of the trainer have, and how they cut it."""

    # digests of what each rank of the trainer has, in the group's order
    held: list[str]
    # lines of the digests that this server may not know
    lines: dict[str, bytes] = {}
    # digests of what the servers' ranks use, as the trainer knows it, by the rank in the group
    wanted: dict[int, str]
    bucket_bytes: int


class ShardsWire:
    """One rank's end. The staging thread owns it."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, Held]] = {}
        self._dealing: tuple[list[str], Dealing] | None = None
        self._describing = Describing()
        # the buckets of the last call, and what they were derived from
        self._buckets: tuple[tuple[Dealing, str, int, int], list[Bucket]] | None = None

    def __call__(
        self,
        source: PartsSource,
        models: Sequence[Any],
        parts: Mapping[str, Region],
        groups: Groups,
        device: torch.device,
        check: Callable[[], None],
    ) -> Weights:
        group = groups.get(source.group_name)
        try:
            sent = msgspec.msgpack.decode(source.body, type=Sent)
            if sent.wanted.get(group.rank) != (used := self._describing.of(models).digest):
                raise ValueError(
                    f"this rank uses the parts {used} of tensors, and the trainer knows others: "
                    "ask for them anew"
                )
            dealing = self._deal(sent)
            wanted = {name: region for name, region in parts.items() if name in dealing.kinds}
            layout = dealing, used, sent.bucket_bytes, group.rank
            if self._buckets is None or self._buckets[0] != layout:
                receiver = group.rank - len(sent.held)
                found = dealing.for_receiver(receiver, wanted, sent.bucket_bytes)
                self._buckets = layout, found
            buckets = self._buckets[1]
        except (msgspec.MsgspecError, ValueError) as error:
            raise Refused(f"the trainer's shards cannot be taken: {error}") from error
        where = group.receives_on(device)
        expected = (
            (row, (row, bucket))
            for bucket in buckets
            for row in [torch.empty(bucket.nbytes, dtype=torch.uint8, device=where)]
        )
        received = group.receive_each(
            expected,
            check,
            source.transfer_id,
            begin=lambda row, content: group.begin_from(content[1].source, row),
        )
        whole = _Whole(wanted, where)
        for row, bucket in received:
            yield from whole.add(bucket, row)
        group.mark_taken(source.transfer_id)

    def _deal(self, sent: Sent) -> Dealing:
        for digest, lines in sent.lines.items():
            self._held[digest] = read_shards(Shards(digest, lines))
        if unknown := [digest for digest in sent.held if digest not in self._held]:
            raise ValueError(f"nothing is known of the layout {unknown[0]}: send its lines")
        if self._dealing is None or self._dealing[0] != sent.held:
            self._held = {digest: self._held[digest] for digest in sent.held}
            self._dealing = sent.held, Dealing([self._held[digest] for digest in sent.held])
        return self._dealing[1]


class _Whole:
    """Puts the pieces of each part together."""

    def __init__(self, wanted: Mapping[str, Region], device: torch.device) -> None:
        self._wanted = wanted
        self._device = device
        # parts that have come in some pieces, and how many elements are missing
        self._begun: dict[str, tuple[torch.Tensor, int]] = {}

    def add(self, bucket: Bucket, row: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parts that are whole with ``bucket``, whose bytes are ``row``."""
        for piece in bucket.pieces:
            region = self._wanted[piece.name]
            came = piece.view(row)
            if piece.region == region:
                yield piece.name, came
                continue
            if piece.name not in self._begun:
                empty = torch.empty(region.sizes, dtype=piece.dtype, device=self._device)
                self._begun[piece.name] = empty, region.numel
            part, missing = self._begun[piece.name]
            part[piece.region.seen_from(region).slices()].copy_(came)
            missing -= piece.region.numel
            self._begun[piece.name] = part, missing
            if not missing:
                del self._begun[piece.name]
                yield piece.name, part


@WIRES.join()
def make_wire() -> tuple[str, ShardsWire]:
    return NAME, ShardsWire()

"""Receives the parts that a rank uses, from the ranks of a trainer that have them.

A call names what the trainer's ranks have, by digests. The rank knows what it uses. From both it
derives the buckets that come, from whom and in which order, and posts a receive for each in turn.
A tensor is staged once all of its part has come.

A sparse call brings the elements of the parts that have changed. What comes of a tensor is two
rows, of positions and of values, and each sender has a stretch of both. The call says how many
elements each sender has, so their buckets are derived as others are, and no size is asked for or
sent. An element of which nothing comes keeps its value: that the trainer's last version is served
is for the trainer to find out, as with a ``Sender``.

Ranks that use the same parts form a chain (``vocabulary/chains.py``). The first one receives the
buckets from the trainer, and each hands a bucket on to the next one while it receives the bucket
after and stages this one. A bucket is handed on as it came: each rank checks its own.

No wait is circular. A rank takes the buckets in one order, and waits for the one before it in the
chain and for the one after it. Each rank is in one chain, and a chain has no cycle: its last rank
waits for nobody after it, its first one for the trainer alone. A trainer's rank sends to each chain
on its own, so the bucket that a first rank waits for is the next one that the sender has for it.
The trainer's ranks agree on what they send in their own group, before the call: none of them waits
for another one while a server waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from sglang.srt.utils.network import get_local_ip_auto

from sglang_inflight.extensions.shards.describing import Describing
from sglang_inflight.messages import PartsSource, is_sparse
from sglang_inflight.metrics import Metrics
from sglang_inflight.mooncake import Mooncake, is_tcp, mooncake_at
from sglang_inflight.scheduler.groups.groups import Group, Groups
from sglang_inflight.scheduler.update.sources.batches import Weights
from sglang_inflight.scheduler.update.sources.reading import WIRES
from sglang_inflight.vocabulary.chains import Place, chains_of, place_of
from sglang_inflight.vocabulary.errors import Refused, shorten
from sglang_inflight.vocabulary.positions import are_within
from sglang_inflight.vocabulary.regions import Region
from sglang_inflight.vocabulary.shard_buckets import FORMAT, Bucket, Dealing
from sglang_inflight.vocabulary.shards import Held, Shards, read_shards
from sglang_inflight.vocabulary.sparse import INDICES, VALUES, tensor_of

NAME = "shards"


class Sent(msgspec.Struct, kw_only=True):
    """The body of a call: what the ranks of the trainer have, and how they cut it."""

    # the rules of the cut, ``shard_buckets.FORMAT``
    format: int
    # digests of what each rank of the trainer has, in the group's order
    held: list[str]
    # lines of the digests that this server may not know
    lines: dict[str, bytes] = {}
    # digests of what the servers' ranks use, as the trainer knows it, by the rank in the group
    wanted: dict[int, str]
    bucket_bytes: int
    # places of the tensors that come, in the order of all; None: all come
    tensors: list[int] | None = None
    # what each rank of the trainer sends to a chain, by the chain's first rank in the group; None:
    # whole parts come
    changed: dict[int, list[list[tuple[int, int]]]] | None = None
    # whether ranks that use the same parts hand them on to each other
    relays: bool = False
    # whether the bytes go by Mooncake's TransferEngine
    mooncake: bool = False


class ShardsWire:
    """One rank's end. The staging thread owns it."""

    def __init__(self, metrics: Metrics) -> None:
        self._received = metrics.counter(
            "sglang:inflight_received_parts_bytes", "Bytes of parts that this rank received."
        )
        self._handed_on = metrics.counter(
            "sglang:inflight_handed_on_parts_bytes", "Bytes that it handed on to another rank."
        )
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
            if sent.format != FORMAT:
                raise ValueError(
                    f"the trainer cuts buckets by the rules {sent.format}, and this server by "
                    f"{FORMAT}: install the same version of the package on both sides"
                )
            if sent.wanted.get(group.rank) != (used := self._describing.of(models).digest):
                raise ValueError(
                    f"this rank uses the parts {used} of tensors, and the trainer knows others: "
                    "ask for them anew"
                )
            if is_sparse(source) != (sent.changed is not None):
                raise ValueError("a sparse call says what has changed, and no other one does")
            dealing = self._deal(sent)
            place = place_of(group.rank, chains_of(sent.wanted, relays=sent.relays))
            wanted = {name: region for name, region in parts.items() if name in dealing.kinds}
            elsewhere: list[str] = []
            rows: Mapping[str, Region]
            if sent.changed is not None:
                counts = sent.changed.get(place.first, [])
                rows, buckets = dealing.changed(counts, wanted, sent.bucket_bytes)
                _refuse_other_shapes(rows, dealing, models)
                elsewhere = _changed_elsewhere(sent.changed, dealing, wanted, rows)
            else:
                rows, buckets = self._whole_parts(sent, dealing, wanted, used, place)
        except (msgspec.MsgspecError, ValueError) as error:
            raise Refused(f"the trainer's shards cannot be taken: {error}") from error
        # RDMA reads a card's memory, and TCP the host's
        where = device if sent.mooncake and not is_tcp() else group.receives_on(device)
        link = _Link(group, place, buckets, where, _own_engine if sent.mooncake else None)
        received = group.receive_each(link.rows(), check, source.transfer_id, begin=link.begin)
        whole = _Whole(rows, where)
        for row, bucket in received:
            if bucket is None:
                continue
            self._received.inc(bucket.nbytes)
            if place.after is not None:
                self._handed_on.inc(bucket.nbytes)
            for name, tensor in whole.add(bucket, row):
                if sent.changed is not None and name.endswith(INDICES):
                    _refuse_outside(name, tensor, dealing, wanted)
                yield name, tensor
        group.mark_taken(source.transfer_id)
        for name in elsewhere:
            yield name + INDICES, torch.empty(0, dtype=torch.int64)
            yield name + VALUES, torch.empty(0, dtype=dealing.kinds[name][0])

    def _whole_parts(
        self,
        sent: Sent,
        dealing: Dealing,
        wanted: Mapping[str, Region],
        used: str,
        place: Place,
    ) -> tuple[Mapping[str, Region], list[Bucket]]:
        """Return the parts that come whole, and their buckets."""
        receiver = place.first - len(sent.held)
        if sent.tensors is not None:
            if not all(0 <= at < len(dealing.names) for at in sent.tensors):
                raise ValueError(f"the trainer has {len(dealing.names)} tensors, and sends others")
            names = {dealing.names[at] for at in sent.tensors}
            wanted = {name: region for name, region in wanted.items() if name in names}
            return wanted, dealing.for_receiver(receiver, wanted, sent.bucket_bytes)
        layout = dealing, used, sent.bucket_bytes, place.first
        if self._buckets is None or self._buckets[0] != layout:
            self._buckets = layout, dealing.for_receiver(receiver, wanted, sent.bucket_bytes)
        return wanted, self._buckets[1]

    def _deal(self, sent: Sent) -> Dealing:
        for digest, lines in sent.lines.items():
            self._held[digest] = read_shards(Shards(digest, lines))
        if unknown := [digest for digest in sent.held if digest not in self._held]:
            raise ValueError(f"nothing is known of the layout {unknown[0]}: send its lines")
        if self._dealing is None or self._dealing[0] != sent.held:
            self._held = {digest: self._held[digest] for digest in sent.held}
            self._dealing = sent.held, Dealing([self._held[digest] for digest in sent.held])
        return self._dealing[1]


def _changed_elsewhere(
    changed: Mapping[int, Sequence[Sequence[tuple[int, int]]]],
    dealing: Dealing,
    wanted: Mapping[str, Region],
    rows: Mapping[str, Region],
) -> list[str]:
    """Return the tensors that change in the parts of other ranks alone.

    A rank notes that they came, without an element: values are refused without their scales, and
    these may change elsewhere.
    """
    places = sorted({at for chain in changed.values() for counts in chain for at, _ in counts})
    if places and not 0 <= places[0] <= places[-1] < len(dealing.names):
        raise ValueError(f"the trainer has {len(dealing.names)} tensors, and changes others")
    names = [dealing.names[at] for at in places]
    return [name for name in names if name in wanted and name + INDICES not in rows]


def _refuse_other_shapes(
    rows: Mapping[str, Region], dealing: Dealing, models: Sequence[Any]
) -> None:
    """Raise ``ValueError`` for a tensor of another shape here: positions in it lie elsewhere."""
    for name in {tensor_of(half) for half in rows}:
        _, shape = dealing.kinds[name]
        for kinds in (model.findings.kinds for model in models):
            if name in kinds and kinds[name].shape != shape:
                raise ValueError(
                    f"{name!r} has the shape {list(shape)} at the trainer, and "
                    f"{list(kinds[name].shape)} in the served checkpoint: send it whole"
                )


def _refuse_outside(
    half: str, at: torch.Tensor, dealing: Dealing, wanted: Mapping[str, Region]
) -> None:
    """Raise ``Refused`` for positions beside the part that this rank uses.

    The load plan takes a change there for another rank's, and would leave it out.
    """
    name = tensor_of(half)
    if not bool(are_within(at, wanted[name], dealing.kinds[name][1]).all()):
        raise Refused(f"changes of {shorten(name)!r} lie outside of the part that this rank uses")


class _Link:
    """A rank's place in its chain during one call. The staging thread owns it."""

    def __init__(
        self,
        group: Group,
        place: Place,
        buckets: Sequence[Bucket],
        device: torch.device,
        engine: Callable[[], Mooncake] | None,
    ) -> None:
        self._group = group
        self._place = place
        self._buckets = buckets
        self._device = device
        self._engine = engine
        # the last bucket's memory, to be handed on with the next receive
        self._last: torch.Tensor | None = None

    def rows(self) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, Bucket | None]]]:
        """Yield memory for each bucket. The last bucket is handed on by an item without one."""
        for bucket in self._buckets:
            row = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
            yield row, (row, bucket)
        if self._place.after is not None and self._last is not None:
            yield self._last, (self._last, None)

    def begin(self, _: torch.Tensor, content: tuple[torch.Tensor, Bucket | None]) -> dist.Work:
        """Begin to receive a bucket, and to hand on the one before it, which has come."""
        row, bucket = content
        sent = received = None
        if self._place.after is not None and self._last is not None:
            sent = self._place.after, self._last
        if bucket is not None:
            before = self._place.before
            received = (bucket.source if before is None else before), row
        self._last = row
        return self._group.begin_between(received, sent, self._engine)


def _own_engine() -> Mooncake:
    return mooncake_at(get_local_ip_auto())


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
def make_wire(metrics: Metrics) -> tuple[str, ShardsWire]:
    return NAME, ShardsWire(metrics)

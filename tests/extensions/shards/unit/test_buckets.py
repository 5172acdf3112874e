"""Sender and receiver derive the same buckets, which bring each wanted element once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_inflight.vocabulary.regions import Region
from sglang_inflight.vocabulary.shard_buckets import Dealing
from sglang_inflight.vocabulary.shards import Held, Shards, read_shards, write_shards
from sglang_inflight.vocabulary.transfers import NotHeld
from tests.unit.test_transfers import regions, shards

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)
DTYPES = ("bfloat16", "float32", "int8")


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_buckets_bring_each_wanted_element_once(data: st.DataObject) -> None:
    ranks, receivers = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    held: list[dict[str, Held]] = [{} for _ in range(ranks)]
    wanted: list[dict[str, Region]] = [{} for _ in range(receivers)]
    full: dict[str, torch.Tensor] = {}
    for n in range(data.draw(st.integers(1, 5))):
        name, shape, dtype = f"t{n}", data.draw(SHAPES), data.draw(st.sampled_from(DTYPES))
        numbers = torch.arange(math.prod(shape)).view(shape) % 100
        full[name] = numbers.to(getattr(torch, dtype))
        of_ranks = data.draw(shards(Region.whole(shape), ranks))
        for of_rank, found in zip(held, of_ranks, strict=True):
            # a rank may know a tensor of which it has nothing
            if found or n % 2:
                of_rank[name] = Held(dtype, shape, found)
        for uses in wanted:
            if data.draw(st.booleans()):
                uses[name] = data.draw(regions(shape))
    most = data.draw(st.sampled_from([1, 40, 1 << 20]))
    at_sender, at_receiver = Dealing(held), Dealing(held)
    for receiver, uses in enumerate(wanted):
        uses = {name: region for name, region in uses.items() if name in at_receiver.kinds}
        sent = {s: iter(at_sender.buckets(s, receiver, uses, most)) for s in range(ranks)}
        came = {name: torch.zeros_like(full[name]) for name in uses}
        counts = {name: torch.zeros(full[name].shape, dtype=torch.int64) for name in uses}
        for bucket in at_receiver.for_receiver(receiver, uses, most):
            # the sender's next bucket is the one that the receiver waits for
            assert next(sent[bucket.source]) == bucket
            assert bucket.nbytes <= most or len(bucket.pieces) == 1
            row = torch.zeros(bucket.nbytes, dtype=torch.uint8)
            for piece in bucket.pieces:
                piece.view(row).copy_(full[piece.name][piece.region.slices()])
            for piece in bucket.pieces:
                came[piece.name][piece.region.slices()] = piece.view(row)
                counts[piece.name][piece.region.slices()] += 1
        assert not any(next(rest, None) for rest in sent.values())
        for name, region in uses.items():
            expected = torch.zeros_like(counts[name])
            expected[region.slices()] = 1
            assert torch.equal(counts[name], expected)
            assert torch.equal(came[name][region.slices()], full[name][region.slices()])


def test_ranks_that_disagree_about_a_tensor_are_named() -> None:
    whole = Region.whole((4,))
    held = [{"w": Held("bfloat16", (4,), (whole,))}, {"w": Held("float32", (4,), (whole,))}]
    with pytest.raises(ValueError, match="rank 1 of the trainer has 'w' as float32 of shape"):
        Dealing(held)


def test_wanted_part_beyond_a_tensor_is_refused() -> None:
    dealing = Dealing([{"w": Held("bfloat16", (4,), (Region.whole((4,)),))}])
    with pytest.raises(ValueError, match=r"'w' has the shape \[4\] here, and rank 0"):
        dealing.buckets(0, 0, {"w": Region((2,), (4,))}, 1)


def test_part_that_nobody_has_is_refused() -> None:
    dealing = Dealing([{"w": Held("bfloat16", (4,), (Region((0,), (3,)),))}])
    with pytest.raises(NotHeld, match="'w'"):
        dealing.buckets(0, 0, {"w": Region.whole((4,))}, 1)


HELD = {
    "model.norm": Held("bfloat16", (4,), (Region.whole((4,)),)),
    "größe": Held("float32", (2, 3), (Region((0, 1), (2, 1)), Region((1, 0), (1, 1)))),
    "scale": Held("float32", (), (Region((), ()),)),
    "none": Held("int8", (2,), ()),
}


def test_lines_are_read_as_they_were_written() -> None:
    found = write_shards(HELD.items())
    assert read_shards(found) == HELD
    assert [*read_shards(found)] == [*HELD]
    assert write_shards(HELD.items()) == found


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: s._replace(digest="0" * 64), "have the digest"),
        (lambda s: s._replace(lines=b"text"), "not compressed by zlib"),
        (lambda s: s._replace(lines=s.lines[:-5]), "cut short"),
        (lambda _: _lines('["w","int8",[2],[[1],[2]]]'), r"'w' of shape \[2\] has no Region"),
        (lambda _: _lines('["w","int8",[2],[[1],[]]]'), "differ in length"),
        (lambda _: _lines('["w","int8",[2],[[1]]]'), "no regions of a tensor"),
        (lambda _: _lines('["w"]'), "no regions of a tensor"),
        (lambda _: _lines("{"), "no regions of a tensor"),
    ],
)
def test_wrong_lines_are_refused(change, why) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=why):
        read_shards(change(write_shards(HELD.items())))


def _lines(text: str) -> Shards:
    import hashlib
    import zlib

    return Shards(hashlib.sha256(text.encode()).hexdigest(), zlib.compress(text.encode()))

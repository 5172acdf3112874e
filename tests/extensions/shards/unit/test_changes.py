"""A changed element goes once to each rank that uses it, and nothing else does."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_inflight.client.shard_changes import Followed, cut_changes, rows_of
from sglang_inflight.client.shard_parts import Own, Shard, pack
from sglang_inflight.vocabulary.errors import Refused
from sglang_inflight.vocabulary.positions import are_within, in_whole
from sglang_inflight.vocabulary.regions import Region
from sglang_inflight.vocabulary.shard_buckets import Bucket, Counts, Dealing
from sglang_inflight.vocabulary.shards import Held, read_shards
from sglang_inflight.vocabulary.sparse import INDICES, VALUES
from tests.unit.test_transfers import regions

Tensors = dict[str, torch.Tensor]

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)
DTYPES = (torch.bfloat16, torch.float32)


@st.composite
def meshes(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> list[Region]:
    """Cut a tensor along each dimension, unevenly, and give each rank a cell, or some the same.

    A rank may have none of the elements.
    """
    lines = []
    for size in shape:
        inner = draw(st.lists(st.integers(1, size), max_size=2, unique=True))
        lines.append(sorted({0, size, *inner}))
    cells = [*product(*map(pairwise, lines))]
    if len(cells) > ranks:
        # too many for these ranks
        cells = [tuple((0, size) for size in shape)]
    spare = st.sampled_from([*cells, None]) if shape else st.sampled_from(cells)
    given_out = [*cells, *(draw(spare) for _ in range(ranks - len(cells)))]
    order = draw(st.permutations(range(ranks)))
    none = Region((0,) * len(shape), (0,) * len(shape))
    found = [
        none
        if cell is None
        else Region(tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
        for cell in given_out
    ]
    return [found[at] for at in order]


def shards_of(tensors: Tensors, held: dict[str, list[Region]], rank: int) -> dict[str, Shard]:
    return {
        name: Shard(tensor[held[name][rank].slices()], held[name][rank].starts, tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def dealing_of(shards: list[dict[str, Shard]], dtype: torch.dtype | None) -> Dealing:
    return Dealing([read_shards(Own(dtype).lines_of(own)) for own in shards])


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_changes_make_the_new_version_of_each_receivers_part(data: st.DataObject) -> None:
    ranks, receivers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    old: Tensors = {}
    new: Tensors = {}
    held: dict[str, list[Region]] = {}
    wanted: list[dict[str, Region]] = [{} for _ in range(receivers)]
    for n in range(data.draw(st.integers(1, 4))):
        name, shape = f"t{n}", data.draw(SHAPES)
        old[name] = (
            torch.arange(math.prod(shape)).view(shape).to(data.draw(st.sampled_from(DTYPES)))
        )
        new[name] = old[name].clone()
        for at in data.draw(st.sets(st.integers(0, old[name].numel() - 1), max_size=4)):
            new[name].view(-1)[at] = -1.5 - at
        held[name] = data.draw(meshes(shape, ranks))
        for uses in wanted:
            if data.draw(st.booleans()):
                uses[name] = data.draw(regions(shape))
    # what the trainer computes in, and sends
    sent_as = data.draw(st.sampled_from([None, torch.float32]))
    most = data.draw(st.sampled_from([1, 40, 1 << 20]))
    before, after = ([shards_of(t, held, rank) for rank in range(ranks)] for t in (old, new))
    dealing = dealing_of(before, sent_as)
    found = []
    for was, now in zip(before, after, strict=True):
        followed = Followed()
        followed.hold(was, dealing.kinds)
        followed.note_sent("one")
        found.append(followed.follow(now, dealing.kinds, (), since="one"))
    whole = {name for each in found for name in each.whole}
    for receiver, uses in enumerate(wanted):
        cuts = [
            cut_changes(
                {name: change for name, change in each.changes.items() if name not in whole},
                shards,
                dealing.buckets(rank, receiver, uses, most),
            )
            for rank, (each, shards) in enumerate(zip(found, after, strict=True))
        ]
        counts: list[Counts] = [
            [(at, len(cut[name].indices)) for at, name in enumerate(dealing.names) if name in cut]
            for cut in cuts
        ]
        rows, buckets = dealing.changed(counts, uses, most)
        sent = {}
        for rank, cut in enumerate(cuts):
            # a rank derives its own ones, and in the receiver's order
            own = [
                bucket for bucket in dealing.changed(counts, uses, most)[1] if bucket.source == rank
            ]
            sent[rank] = map(pack, own, [rows_of(cut, rows, own)] * len(own))
        came = receive(buckets, rows, sent)
        for name, region in uses.items():
            made = old[name].to(dealing.kinds[name][0], copy=True)
            changed = (old[name] != new[name]).view(-1)
            if name in whole:
                assert name + INDICES not in came
                continue
            outside = torch.ones(made.shape, dtype=torch.bool)
            outside[region.slices()] = False
            changed &= ~outside.view(-1)
            if not changed.any():
                assert name + INDICES not in came
                continue
            places = came[name + INDICES].long()
            # each once
            assert sorted(places.tolist()) == changed.nonzero().view(-1).tolist()
            made.view(-1)[places] = came[name + VALUES]
            expected = new[name].to(made.dtype)[region.slices()]
            assert torch.equal(made[region.slices()], expected)


def receive(
    buckets: list[Bucket], rows: dict[str, Region], sent: dict[int, Any]
) -> dict[str, torch.Tensor]:
    came: dict[str, torch.Tensor] = {}
    counts = {name: torch.zeros(region.sizes) for name, region in rows.items()}
    for bucket in buckets:
        row = next(sent[bucket.source])
        assert row.nbytes == bucket.nbytes
        for piece in bucket.pieces:
            view = piece.view(row)
            came.setdefault(piece.name, torch.zeros(rows[piece.name].sizes, dtype=view.dtype))
            came[piece.name][piece.region.slices()] = view
            counts[piece.name][piece.region.slices()] += 1
    assert not any(next(rest, None) is not None for rest in sent.values())
    assert all(bool((count == 1).all()) for count in counts.values())
    return came


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_positions_in_a_part_are_those_of_its_elements(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    region, other = data.draw(regions(shape)), data.draw(regions(shape))
    numbers = torch.arange(math.prod(shape)).view(shape)
    part = numbers[region.slices()].reshape(-1)
    assert torch.equal(in_whole(torch.arange(len(part)), region, shape), part)
    inside = set(numbers[other.slices()].reshape(-1).tolist())
    for dtype in (torch.int32, torch.int64):
        expected = [at in inside for at in part.tolist()]
        assert are_within(part.to(dtype), other, shape).tolist() == expected


NAMES = {"a": (4, 2), "b": (3,)}


@pytest.fixture
def shards() -> dict[str, Shard]:
    return {
        name: Shard(torch.zeros(shape, dtype=torch.bfloat16), (0,) * len(shape), shape)
        for name, shape in NAMES.items()
    }


def test_change_of_a_wider_float_that_is_none_when_sent_is_none() -> None:
    one = {"w": Shard(torch.ones(100), (0,), (100,))}
    kinds = dealing_of([one], torch.bfloat16).kinds
    followed = Followed()
    followed.hold(one, kinds)
    followed.note_sent("one")
    moved = {"w": Shard(torch.full((100,), 1.0001), (0,), (100,))}
    moved["w"].tensor[7] = 2
    found = followed.follow(moved, kinds, (), since="one")
    assert found.changes["w"].indices.tolist() == [7]
    assert found.changes["w"].values.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (float("nan"), {"a"}),
        (float("inf"), {"a"}),
        # larger as changes than whole
        (list(range(8)), {"a"}),
        (1.0, set()),
    ],
)
def test_tensor_comes_whole_where_a_sender_sends_it_whole(
    shards: dict[str, Shard], value: Any, names: set[str]
) -> None:
    kinds = dealing_of([shards], None).kinds
    followed = Followed()
    followed.hold(shards, kinds)
    followed.note_sent("one")
    if isinstance(value, list):
        shards["a"].tensor.view(-1)[:] = torch.tensor(value) + 1
    else:
        shards["a"].tensor.view(-1)[1] = value
    assert followed.follow(shards, kinds, ("b",), since="one").whole == names | {"b"}


def test_rank_that_has_sent_another_version_finds_no_changes(shards: dict[str, Shard]) -> None:
    kinds = dealing_of([shards], None).kinds
    followed = Followed()
    with pytest.raises(Refused, match="this rank has sent None"):
        followed.follow(shards, kinds, (), since="one")
    followed.hold(shards, kinds)
    followed.note_sent("one")
    with pytest.raises(
        Refused, match="changes since 'two' are wanted, and this rank has sent 'one"
    ):
        followed.follow(shards, kinds, (), since="two")
    followed.follow(shards, kinds, (), since="one")
    # the version after was not sent to its end
    with pytest.raises(Refused, match="this rank has sent None"):
        followed.follow(shards, kinds, (), since="one")


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ([], "1 ranks of the trainer send, and 0 count"),
        ([[(2, 1)]], "sends 1 of tensor 2"),
        ([[(-1, 1)]], "sends 1 of tensor -1"),
        ([[(0, 0)]], "sends 0 of tensor 0"),
        ([[(0, 1), (0, 1)]], "sends 1 of tensor 0"),
        ([[(0, 5)]], "of 'a' more elements have changed than the receiver uses"),
        ([[(1, 1)]], "of 'b' more elements have changed than the receiver uses"),
    ],
)
def test_counts_that_cannot_be_are_refused(counts: list[Counts], why: str) -> None:
    held = {n: Held("bfloat16", shape, (Region.whole(shape),)) for n, shape in NAMES.items()}
    wanted = {"a": Region((0, 0), (2, 2))}
    with pytest.raises(ValueError, match=why):
        Dealing([held]).changed(counts, wanted, 1 << 20)

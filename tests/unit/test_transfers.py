"""Each wanted element is sent once, by a rank that has it, whatever the shards are."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_inflight.vocabulary.regions import Region
from sglang_inflight.vocabulary.transfers import NotHeld, Transfers, parts_of

Held = tuple[tuple[Region, ...], ...]


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    starts = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, starts, strict=True))
    return Region(starts, sizes)


@st.composite
def shards(draw: st.DrawFn, whole: Region, ranks: int) -> Held:
    """Cut ``whole`` anywhere, and give each piece to one rank or several."""
    pieces = [whole]
    for _ in range(draw(st.integers(0, 4))):
        piece = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, len(piece.sizes) - 1)) if piece.sizes else None
        if dim is None or piece.sizes[dim] == 1:
            pieces.append(piece)
            continue
        cut = draw(st.integers(1, piece.sizes[dim] - 1))
        low = Region(piece.starts, (*piece.sizes[:dim], cut, *piece.sizes[dim + 1 :]))
        pieces += [low, *piece.without(low)]
    held: list[list[Region]] = [[] for _ in range(ranks)]
    for piece in pieces:
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].append(piece)
    return tuple(map(tuple, held))


SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_each_wanted_element_comes_once_from_a_rank_that_has_it(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    ranks = data.draw(st.integers(1, 4))
    held = data.draw(shards(Region.whole(shape), ranks))
    wanted = data.draw(regions(shape))
    came = torch.zeros(shape, dtype=torch.int64)
    for part in parts_of(wanted, held, data.draw(st.integers(0, 3))):
        came[part.region.slices()] += 1
        assert any(part.region.overlap(each) == part.region for each in held[part.source])
    expected = torch.zeros(shape, dtype=torch.int64)
    expected[wanted.slices()] = 1
    assert torch.equal(came, expected)


@settings(deadline=None)
@given(data=st.data())
def test_regions_less_others_have_each_element_once(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    one, other = data.draw(regions(shape)), data.draw(regions(shape))
    counted, expected = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    for each in one.without(other):
        counted[each.slices()] += 1
    expected[one.slices()] = 1
    expected[other.slices()] = 0
    assert torch.equal(counted, expected)
    both = one.overlap(other)
    assert (0 if both is None else both.numel) == one.numel - int(expected.sum())
    around = one.around(other)
    assert one.overlap(around) == one
    assert other.overlap(around) == other
    assert around.numel <= math.prod(shape)


def test_replicas_share_the_work() -> None:
    whole = Region.whole((8,))
    names = [f"layers.{at}" for at in range(40)]
    transfers = Transfers([dict.fromkeys(names, (whole,)) for _ in range(4)], names)
    sources = Counter(transfers.of_tensor(at, whole, 0)[0].source for at in range(40))
    assert sources == dict.fromkeys(range(4), 10)


def test_element_that_no_rank_has_is_named() -> None:
    held = [{"w": (Region((0,), (3,)),)}]
    transfers = Transfers(held, ["w"])
    with pytest.raises(NotHeld, match=r"of 'w' no rank has .*starts=\(3,\), sizes=\(1,\)"):
        transfers.of_tensor(0, Region.whole((4,)), 0)

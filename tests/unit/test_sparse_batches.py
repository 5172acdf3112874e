"""Parts of many tensors go where each of them would alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sglang_inflight.scheduler.plans.moves import Move, can_locate, without_repeats
from sglang_inflight.scheduler.plans.patches import patches_of
from sglang_inflight.scheduler.plans.recorder import Planned
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.sources.sparse import Sparse, find_largest, largest_in
from sglang_inflight.scheduler.update.weight import Weight
from sglang_inflight.vocabulary.errors import Refused
from tests.support.rank import Rank

SIZE = 24
MOVES = st.sampled_from(
    [
        Move((24,), 0, (1,), 0, (1,)),
        Move((5,), 3, (1,), 40, (1,)),
        Move((4, 3), 1, (6, 1), 60, (3, 1)),
        Move((6, 4), 0, (1, 6), 96, (4, 1)),
        Move((2, 3, 2), 0, (12, 4, 1), 130, (6, 2, 1)),
        Move((3, 4), 2, (0, 1), 150, (4, 1)),
        Move((), 7, (), 170, ()),
    ]
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, SIZE - 1), unique=True, max_size=SIZE),
            st.lists(st.tuples(MOVES, st.integers(0, 2)), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_patches_are_what_whole_tensors_with_these_elements_would_bring(tensors: Any) -> None:
    # a part of the memory for each tensor, so that no two of them share an element
    live = [torch.zeros(len(tensors), 200) for _ in range(3)]
    weights = {f"w{at}": Weight(f"w{at}", weight) for at, weight in enumerate(live)}
    batch, moves, expected = [], {}, [weight.clone() for weight in live]
    for number, (indices, planned) in enumerate(tensors):
        at, values = torch.tensor(indices, dtype=torch.int32), torch.rand(len(indices)) + 1
        batch.append(Sparse(f"t{number}", at, values, (SIZE,)))
        whole = torch.zeros(SIZE)
        whole[at.long()] = values
        used = {place: move for move, place in planned}
        found = [
            Planned(f"w{place}", move._replace(to=move.to + 200 * number), ())
            for place, move in used.items()
        ]
        moves[f"t{number}"] = tuple(found)
        for each in found:
            assert all(map(can_locate, without_repeats(each.move)))
            source = each.move.source.view(whole)
            target = each.move.target.view(expected[int(each.place[1])].view(-1))
            target[source > 0] = source[source > 0]
    for patch in patches_of(batch, moves, weights):
        memory = patch.weight.live.view(-1)
        assert not memory[patch.at].any()
        memory[patch.at] = patch.values
    for weight, other in zip(live, expected, strict=True):
        assert torch.equal(weight, other)


def part(name: str, indices: list[int], values: list[float], dtype: Any = torch.int64) -> Sparse:
    return Sparse(name, torch.tensor(indices, dtype=dtype), torch.tensor(values), (4, 2))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (part("b", [0, 8], [1.0, 1.0]), "'b': index 8 is out of range"),
        (part("b", [-1, 3], [1.0, 1.0]), "'b': index -1 is out of range"),
        (part("b", [3, 3], [1.0, 1.0]), "'b': index 3 comes twice"),
        (part("b", [0, 3], [1.0, torch.nan]), "'b': values hold NaN"),
    ],
)
def test_wrong_part_among_others_is_looked_at_alone(wrong: Sparse, why: str) -> None:
    others = [part("a", [7], [2.0]), part("c", [0, 7], [1.0, -3.0], torch.int32)]
    assert largest_in(others) == 3
    assert largest_in([others[0], wrong, others[1]]) is None
    with pytest.raises(Refused, match=why):
        find_largest(wrong)


def test_parts_without_an_order_are_looked_at_alone() -> None:
    unordered = part("b", [3, 0], [5.0, 1.0])
    assert largest_in([part("a", [7], [2.0]), unordered]) is None
    assert find_largest(unordered) == 5


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Parameter(torch.zeros(4, 2, dtype=torch.bfloat16), requires_grad=False)
            for _ in range(2)
        )

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


@pytest.mark.parametrize("mode", [StagingMode.DEVICE, StagingMode.CHANGES])
@pytest.mark.parametrize(
    ("value", "why"), [(torch.nan, "'b': values hold NaN"), (3.4e38, "'b' holds a value of magn")]
)
def test_wrong_value_among_parts_is_refused_by_its_tensors_name(
    mode: StagingMode, value: float, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rank, "plans", True)
    model = Two()
    rank = Rank(mode, model, checkpoint_shapes={"a": (4, 2), "b": (4, 2)})
    parts = {}
    for name in ("a", "b"):
        parts[f"{name}.indices"] = torch.tensor([1, 5])
        parts[f"{name}.values"] = torch.tensor([1.0, 2.0])
    parts["b.values"][1] = value
    update = rank.begin(partial=True)
    with torch.no_grad(), pytest.raises(Refused, match=why):
        rank.send(update, [parts], "sparse")
    assert not model.a.any()

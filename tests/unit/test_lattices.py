"""Boxes in even steps are copied by one call, and end where each would alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_inflight.scheduler.plans.lattice import Range, find_lattices
from sglang_inflight.scheduler.plans.moves import Box
from sglang_inflight.scheduler.plans.targets import Targets
from sglang_inflight.scheduler.update.weight import Weight

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.complex128]


def numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 127, (count,)).to(torch.uint8).to(dtype)


@settings(deadline=None)
@given(
    size=st.integers(1, 9),
    orders=st.lists(st.permutations(range(12)), min_size=1, max_size=3),
    first=st.integers(0, 9),
    gap=st.integers(0, 3),
    start=st.integers(0, 8),
    dtype=st.sampled_from(DTYPES),
)
def test_ranges_end_where_each_would_alone(
    size: int,
    orders: list[list[int]],
    first: int,
    gap: int,
    start: int,
    dtype: torch.dtype,
) -> None:
    """Weights take turns in the row. With a gap their ranges are no multiples of their size."""
    held = [numbers(start + first + 12 * (size + gap), dtype) for _ in orders]
    weights = [Weight(f"w{n}", memory[start:]) for n, memory in enumerate(held)]
    targets, row, expected = Targets(), [], [weight.live.clone() for weight in weights]
    for places in zip(*orders, strict=True):
        for weight, alone, place in zip(weights, expected, places, strict=True):
            offset, new = first + place * (size + gap), numbers(size, dtype)
            targets.add(weight, Box(offset, (size,), (1,)))
            row.append(new)
            alone[offset : offset + size] = new
    before = [memory.clone() for memory in held]
    for row_start in (0, 1):
        whole = torch.cat([numbers(row_start, dtype), *row])[row_start:]
        targets.copy([weight.live for weight in weights], whole)
        for memory, weight, alone, was in zip(held, weights, expected, before, strict=True):
            assert torch.equal(weight.live.view(torch.uint8), alone.view(torch.uint8))
            assert torch.equal(memory[:start].view(torch.uint8), was[:start].view(torch.uint8))
            memory.copy_(was)


@pytest.mark.parametrize(
    ("what", "ranges"),
    [
        ("few", [Range(n, n * 4, n * 4, 4) for n in range(7)]),
        ("uneven", [Range(n, n * n * 4, n * 4, 4) for n in range(20)]),
        ("between rows", [Range(n, n * 4, n * 6, 4) for n in range(20)]),
    ],
)
def test_ranges_without_a_common_step_are_no_lattice(what: str, ranges: list[Range]) -> None:
    assert not [*find_lattices(ranges)], what


def test_ranges_of_another_size_between_do_not_part_a_lattice() -> None:
    ranges = [Range(n, n * 12, (19 - n) * 8, 8) for n in range(20)]
    others = [Range(20 + n, n * 12 + 8, 200 + n * 5, 4) for n in range(20)]
    ((lattice, found),) = find_lattices([*ranges, *others])
    assert (lattice.start, lattice.step, lattice.first) == (0, 12, 0)
    assert lattice.at == [*range(19, -1, -1)]
    assert found == [*range(20)]

"""Tables of an exchange: right, made piece by piece, and exchanged without a look at each part."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_inflight.scheduler.update.changes import exchange, exchange_kernel, tables
from sglang_inflight.scheduler.update.changes.encoding import (
    BLOCK,
    Changes,
    Part,
    find_changes,
)
from sglang_inflight.scheduler.update.changes.exchange import Exchange
from sglang_inflight.scheduler.update.changes.exchange_kernel import Launch
from sglang_inflight.scheduler.update.changes.tables import build_tables
from sglang_inflight.scheduler.update.swap import PreparedSwap, swap_for
from tests.support.calls import calls_of

CPU = torch.device("cpu")
Row = tuple[int, int, int, int]


def rows_of(weight: torch.Tensor, part: Part) -> Iterator[Row]:
    """Yield the rows of ``part``, one block after the other."""
    width = weight.element_size()
    positions = part.positions() + part.start
    for begin in range(part.start, part.start + part.length, BLOCK):
        before = int((positions < begin).count_nonzero())
        inside = int((positions < begin + BLOCK).count_nonzero()) - before
        if inside:
            offsets = 0 if part.offsets is None else part.offsets.data_ptr() + 2 * before
            yield (
                weight.data_ptr() + begin * width,
                part.values.data_ptr() + before * width,
                offsets,
                inside,
            )


@st.composite
def changes(draw: st.DrawFn) -> Changes:
    """Draw some weights of two widths, and parts of both kinds, some with empty blocks."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from([torch.int16, torch.uint8]))
        length = draw(st.sampled_from([3, BLOCK, 2 * BLOCK + 5]))
        parts = []
        for _ in range(draw(st.integers(0, 4))):
            new = torch.zeros(length, dtype=dtype)
            new[draw(st.integers(0, length - 1)) :: draw(st.sampled_from([1, 40_000, length]))] = 1
            start = draw(st.sampled_from([0, 7]))
            parts.append(find_changes(start, torch.zeros_like(new), new))
        weight = torch.zeros(length + 7, dtype=dtype)
        found.append((weight, [part for part in parts if part is not None]))
    return found


@settings(max_examples=60, deadline=None)
@given(changes(), st.integers(1, 5))
def test_table_has_a_row_for_each_block_with_changes(changed: Changes, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_PARTS_AT_ONCE", at_once)
        found = build_tables(changed, CPU)
    expected: dict[int, list[Row]] = {}
    for weight, parts in changed:
        for part in parts:
            expected.setdefault(weight.element_size(), []).extend(rows_of(weight, part))
    rows = {width: sorted(map(tuple, table.tolist())) for width, table in found.items()}
    assert rows == {width: sorted(wanted) for width, wanted in expected.items()}


def update_of(weights: int, parts_each: int) -> Changes:
    """Return changes in the size of a model's, with one element each."""
    values, offsets = torch.zeros(1, dtype=torch.int16), torch.zeros(1, dtype=torch.uint16)
    counts = torch.ones(1, dtype=torch.int64).numpy()
    part = Part(0, BLOCK, values, offsets, counts, 1)
    return [(torch.zeros(BLOCK, dtype=torch.bfloat16), [part] * parts_each) for _ in range(weights)]


def test_seal_lets_steps_run_between_some_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    yielded = []
    monkeypatch.setattr(tables, "yield_gil", lambda: yielded.append(True))
    build_tables(update_of(3, 1000), CPU)
    # once to make some rows, and once to copy them to the device
    assert len(yielded) >= 2 * 3000 // tables._PARTS_AT_ONCE


class Kernel:
    """Stands for the compiled kernel: counts its programs."""

    def __init__(self) -> None:
        self.programs: list[int] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *_: self.programs.append(grid[0])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Let exchanges of this test launch a kernel, as on a device."""
    kernel = Kernel()
    monkeypatch.setattr(exchange_kernel, "_exchange", kernel)
    monkeypatch.setattr(exchange, "_Reference", lambda changed: Launch(changed, CPU))
    return kernel


def test_commit_takes_as_many_calls_for_any_number_of_parts_and_weights(kernel: Kernel) -> None:
    calls = []
    for weights, parts_each in ((1, 1), (2, 300), (60, 40)):
        changed = update_of(weights, parts_each)
        swap = PreparedSwap(swap_for(CPU), changes=Exchange(changed))
        calls.append(calls_of(swap.make))
        assert kernel.programs[-1] == weights * parts_each
        assert swap.make() == weights * parts_each * 2
        # caches notice the change
        assert {weight._version for weight, _ in changed} == {2}
    assert len(set(calls)) == 1

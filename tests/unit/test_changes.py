"""Scratch memory that a loader writes is staged as changes, and an exchange undoes itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_inflight.scheduler.update.changes import handles, recording
from sglang_inflight.scheduler.update.changes.encoding import (
    PIECE,
    Part,
    bits_of,
    find_changes,
    put_into,
    without_range,
)
from sglang_inflight.scheduler.update.changes.exchange import Exchange
from sglang_inflight.scheduler.update.changes.intervals import Intervals
from sglang_inflight.scheduler.update.changes.recording import Budget, Recording
from sglang_inflight.scheduler.update.checks.dataflow import Dataflow
from sglang_inflight.scheduler.update.forms import Changes
from sglang_inflight.scheduler.update.loaded_model import LoadedModel
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.swap import swap_for
from sglang_inflight.tensor_digest import Digest, HostReader, TensorDigest
from sglang_inflight.vocabulary.errors import Outgrown, Refused


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Turn gradients off, like the staging thread."""
    with torch.no_grad():
        yield


def random_bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return any bit patterns of ``dtype``: NaN payloads and signed zeros too."""
    of_bytes = torch.randint(
        0,
        256,
        (count * dtype.itemsize,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    return of_bytes.view(dtype)


def are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits_of(one), bits_of(other))


@dataclass
class Rank:
    """Weights, and a recording of the writes to them."""

    weights: list[torch.Tensor]
    keeps: bool
    budget: Budget

    def __post_init__(self) -> None:
        self.recording = Recording(self.budget, UNPACED)
        model = nn.Module()
        model.weights = nn.ParameterList(
            nn.Parameter(weight, requires_grad=False) for weight in self.weights
        )
        self.weights = [*model.parameters()]
        self.form = Changes(self.recording, swap_for(torch.device("cpu")), UNPACED)
        windows = self.budget.windows
        self.scratch = LoadedModel(model, (), self.form, UNPACED, windows, check_finite=False)
        self.handles = [own for _, _, own in self.scratch._shadow.pairs]
        self.begin()

    def begin(self) -> None:
        self.form.begin()
        for weight in self.scratch.weights:
            self.form.expect(weight, keeps=self.keeps)
        self.scratch.begin(None, is_partial=self.keeps)
        self.scratch.restore()

    def record(self, writes: Sequence[Callable[[list[torch.Tensor]], object]]) -> None:
        """Make ``writes``, each given the tensors in place of the weights."""
        targets = self.scratch.targets()
        with Dataflow(targets, before_write=lambda write: None, recorder=self.scratch):
            for write in writes:
                write(self.handles)
        self.scratch.end_call()

    def unwritten(self, at: int) -> int:
        return self.scratch.unwritten(f"weights.{at}")

    def commit(self) -> Exchange:
        self.scratch.seal(was_loaded=True)
        exchange = Exchange(self.recording.changes())
        exchange.make()
        return exchange


SHAPES = [(7, 5), (64,), (3, 4, 5)]
DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.int64]


def served_values(which: int, dtype: torch.dtype) -> torch.Tensor:
    return random_bits(torch.Size(SHAPES[which]).numel(), dtype, 7).view(SHAPES[which])


def drawn_values(draw: st.DrawFn, which: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the served values of a weight, with others in some places."""
    values = served_values(which, dtype)
    others = random_bits(values.numel(), dtype, draw(st.integers(0, 5))).view(values.shape)
    every = draw(st.sampled_from([1, 2, 7, 100]))
    values.view(-1)[1::every] = others.view(-1)[1::every]
    return values


@st.composite
def whole_copies(
    draw: st.DrawFn, dtype: torch.dtype
) -> list[Callable[[list[torch.Tensor]], object]]:
    """Draw a copy into each weight."""
    values = [drawn_values(draw, which, dtype) for which in range(len(SHAPES))]
    return [
        lambda weights, at=at, new=new: weights[at].copy_(new)  # type: ignore[misc]
        for at, new in enumerate(values)
    ]


@st.composite
def writes_to(draw: st.DrawFn, dtype: torch.dtype) -> Callable[[list[torch.Tensor]], object]:
    """Draw an operation on one of the weights."""
    which = draw(st.integers(0, len(SHAPES) - 1))
    shape = SHAPES[which]
    begin = draw(st.integers(0, shape[0] - 1))
    rows = draw(st.integers(1, shape[0] - begin))
    kinds = ["rows", "columns", "fill", "index", "from another", "expand", "read", "read itself"]
    kind = draw(st.sampled_from(kinds))
    values = drawn_values(draw, which, dtype)
    other, first = draw(st.integers(0, len(SHAPES) - 1)), draw(st.integers(0, 30))

    def write(weights: list[torch.Tensor]) -> object:
        target = weights[which]
        if kind == "read":
            # a loader copies from what it has written
            of = weights[other].view(-1)[first : first + 5]
            return target.view(-1)[:5].copy_(of.clone() if which == other else of)
        if kind == "read itself":
            return target[begin].copy_(target[begin].flip(0))
        if kind == "rows":
            return target.narrow(0, begin, rows).copy_(values.narrow(0, begin, rows))
        if kind == "columns":
            return target.movedim(0, -1)[..., begin : begin + rows].copy_(
                values.movedim(0, -1)[..., begin : begin + rows]
            )
        if kind == "fill":
            return target[begin].fill_(1)
        if kind == "index":
            return target.index_copy_(0, torch.tensor([begin]), values[begin : begin + 1])
        if kind == "from another":
            return target.view(-1)[:7].copy_(values.view(-1)[:7]).sub_(values.view(-1)[0])
        return target.narrow(0, begin, rows).copy_(values[0])

    return write


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_recorded_writes_equal_writes_to_the_weights(data: st.DataObject) -> None:
    """Writes of any kind and order, with windows that close at any time."""
    dtype = data.draw(st.sampled_from(DTYPES))
    is_whole = data.draw(st.booleans())
    # a weight that nobody wrote has no value in a whole update
    writes = data.draw(whole_copies(dtype)) if is_whole else []
    writes += data.draw(st.lists(writes_to(dtype), max_size=8))
    windows = data.draw(st.sampled_from([0, 100, 1 << 20]))
    weights = [served_values(which, dtype) for which in range(len(SHAPES))]
    rank = Rank(weights, not is_whole, Budget(windows=windows))
    weights = rank.weights
    before = [weight.clone() for weight in weights]
    expected = [weight.clone() for weight in weights]
    for write in writes:
        write(expected)
    rank.record(writes)
    assert all(map(are_same, weights, before)), "the served weights were written"
    rank.scratch.seal(was_loaded=True)
    assert not is_whole or not any(map(rank.unwritten, range(len(weights))))
    digest, of_expected = Digest(), Digest()
    for weight, wanted in zip(weights, expected, strict=True):
        one = TensorDigest("w", weight)
        for _ in one.read(HostReader(), rank.recording.as_committed(weight)):
            pass
        digest.add(one.line)
        for _ in of_expected.read("w", wanted):
            pass
    assert digest.hexdigest() == of_expected.hexdigest()
    exchange = rank.commit()
    assert all(map(are_same, weights, expected))
    exchange.make()
    assert all(map(are_same, weights, before))
    exchange.make()
    assert all(map(are_same, weights, expected))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_unwritten_elements_are_counted(data: st.DataObject) -> None:
    shape = 8, 6
    live = torch.zeros(shape)
    rank = Rank([live], False, Budget(windows=data.draw(st.sampled_from([0, 1 << 20]))))
    is_written = torch.zeros(shape, dtype=torch.bool)

    def write(begin: int, end: int, by_rows: bool, by_copy: bool) -> Callable[..., object]:
        def act(weights: list[torch.Tensor]) -> object:
            part = weights[0][begin:end] if by_rows else weights[0][:, begin:end]
            return part.copy_(torch.ones(part.shape)) if by_copy else part.fill_(0)

        return act

    for _ in range(data.draw(st.integers(0, 5))):
        begin = data.draw(st.integers(0, 5))
        end = data.draw(st.integers(begin, 6))
        by_rows = data.draw(st.booleans())
        rank.record([write(begin, end, by_rows, data.draw(st.booleans()))])
        (is_written[begin:end] if by_rows else is_written[:, begin:end]).fill_(True)
    assert rank.unwritten(0) == int((~is_written).sum())


def test_copies_touch_no_memory_of_the_handle() -> None:
    live = torch.zeros(1 << 20)
    rank = Rank([live], False, Budget(host=0))
    rank.record([lambda weights: weights[0][:500].copy_(torch.ones(500))])
    assert rank.recording.peak_bytes == 500 * 4
    rank.commit()
    assert rank.weights[0].sum() == 500


@pytest.mark.parametrize("width", [torch.uint8, torch.bfloat16, torch.float32])
def test_sparse_and_dense_parts_take_the_fewer_bytes(width: torch.dtype) -> None:
    live = torch.zeros(PIECE, dtype=width)
    for share in 0.001, 0.01, 0.3, 0.6, 1.0:
        new = live.clone()
        count = int(share * PIECE)
        new[torch.randperm(PIECE)[:count]] = 1
        part = find_changes(0, bits_of(live), bits_of(new))
        assert part is not None
        assert part.nbytes == min(count * (width.itemsize + 2), PIECE * width.itemsize)
        memory = live.clone()
        put_into(part, bits_of(memory))
        assert are_same(memory, new)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_part_without_a_range_keeps_the_rest(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 200_000))
    live = torch.zeros(length, dtype=torch.int16)
    new = live.clone()
    stride = data.draw(st.sampled_from([1, 2, 7, 70_000]))
    new[::stride] = 3
    part = find_changes(1000, live, new)
    assert isinstance(part, Part)
    start = data.draw(st.integers(0, length))
    end = data.draw(st.integers(start, length))
    memory = torch.zeros(length, dtype=torch.int16)
    for rest in without_range(part, 1000 + start, 1000 + end):
        put_into(rest, memory, 1000)
    new[start:end] = 0
    assert torch.equal(memory, new)


@pytest.mark.parametrize("stride", [1, 7])
def test_cut_part_stays_where_a_kernel_reads_it(
    monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    """A later write of an update covers a part of an earlier one, and both wait on the host."""
    pinned: set[int] = set()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        pinned.add(copy.data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in pinned)
    new = torch.zeros(1000, dtype=torch.int16)
    new[::stride] = 3
    part = find_changes(0, torch.zeros_like(new), new)
    assert part is not None
    device = torch.device("meta")
    assert not part.is_readable_on(device)
    part.move_to_host()
    assert part.is_readable_on(device)
    rest = without_range(part, 300, 400)
    assert rest
    assert all(one.is_readable_on(device) for one in rest)


def test_changes_out_of_a_kernels_reach_are_refused_before_the_vote() -> None:
    part = find_changes(0, torch.zeros(9, dtype=torch.int32), torch.ones(9, dtype=torch.int32))
    assert part is not None
    with pytest.raises(Refused, match="in memory that meta cannot read"):
        Exchange([(torch.empty(9, device="meta"), [part])])
    on_the_device, on_the_host = torch.empty(9, device="meta"), torch.zeros(9)
    part_there = Part(0, 9, torch.empty(9, dtype=torch.int32, device="meta"))
    with pytest.raises(Refused, match="in memory that meta cannot read"):
        Exchange([(on_the_device, [part_there]), (on_the_host, [part])])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_memory_gets_the_values_within_it(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 200_000))
    new = torch.zeros(length, dtype=torch.int16)
    # every element changes: a whole range; or a few
    new[:: data.draw(st.sampled_from([1, 7, 70_000]))] = 3
    part = find_changes(1000, torch.zeros_like(new), new)
    assert part is not None
    start = data.draw(st.integers(0, 2000 + length))
    end = data.draw(st.integers(start, 2000 + length))
    memory = torch.zeros(end - start, dtype=torch.int16)
    put_into(part, memory, start)
    around = torch.zeros(2000 + length, dtype=torch.int16)
    around[1000 : 1000 + length] = new
    assert torch.equal(memory, around[start:end])


@pytest.fixture(params=["tells", "has no /proc", "says nothing"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the system tell which pages were written, or not, like gVisor."""
    if request.param != "tells":

        def look(address: int, nbytes: int) -> bool:
            if request.param == "has no /proc":
                raise FileNotFoundError("/proc/self/pagemap")
            return False

        monkeypatch.setattr(handles, "_are_pages_written", look)
    handles._tells_written_pages.cache_clear()
    yield
    handles._tells_written_pages.cache_clear()


@pytest.mark.usefixtures("system")
def test_weight_written_through_numpy_is_refused() -> None:
    live = torch.zeros(3000)
    rank = Rank([live, torch.zeros(3000)], True, Budget())
    rank.record([lambda weights: weights[1].copy_(torch.ones(3000))])
    rank.handles[0].numpy()[5] = 1
    with pytest.raises(Refused, match=r"'weights\.0' past torch's operations"):
        rank.scratch.seal(was_loaded=True)
    rank.begin()
    rank.scratch.seal(was_loaded=True)


def test_empty_weight_is_recorded() -> None:
    rank = Rank([torch.zeros(0, 4)], True, Budget())
    rank.record([lambda weights: weights[0].copy_(torch.zeros(0, 4))])
    rank.scratch.seal(was_loaded=True)
    assert rank.recording.changes() == []


def test_changes_beyond_their_budget_are_refused() -> None:
    live = torch.zeros(3000)
    rank = Rank([live], True, Budget(device=400, host=0))
    with pytest.raises(Refused, match=r"changes more than .* \(SGLANG_INFLIGHT_CHANGES_BYTES\)"):
        rank.record([lambda weights: weights[0].copy_(torch.ones(3000))])


@pytest.mark.parametrize("write", ["copy", "index"])
def test_device_without_memory_for_a_comparison_loses_no_change(
    monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    live = torch.zeros(3000)
    new = random_bits(3000, torch.float32, 3)
    rank = Rank([live], True, Budget())
    name = {"copy": "compare", "index": "find_changes"}[write]
    original, calls = getattr(recording, name), []

    def fails_once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no memory for the comparison")
        return original(*args)

    monkeypatch.setattr(recording, name, fails_once)
    if write == "copy":
        rank.record([lambda weights: weights[0].copy_(new)])
    else:
        rank.record([lambda weights: weights[0].index_copy_(0, torch.arange(3000), new)])
    assert len(calls) == 2
    committed = torch.cat(list(rank.recording.as_committed(rank.weights[0])))
    assert are_same(committed, new)


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_receipt_reads_no_element() -> None:
    """A read of the device for each part would hold up the seal, unpaced."""
    live = torch.zeros(3 * PIECE, dtype=torch.int16)
    rank = Rank([live], True, Budget())
    rank.record([lambda weights: weights[0].copy_(torch.arange(3 * PIECE, dtype=torch.int16))])
    # the whole range of a part is kept, and loses its middle
    rank.record([lambda weights: weights[0][10:20].copy_(torch.zeros(10))])
    rank.scratch.seal(was_loaded=True)
    with Operations() as done:
        described = rank.recording.describe()
    assert done.count == 0
    rank.commit()
    assert described.changed_elements == int(rank.weights[0].count_nonzero())


@pytest.fixture
def pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep parts of the host where they are: a machine without a device pins no memory."""
    monkeypatch.setattr(Part, "move_to_host", lambda part: None)


@pytest.mark.usefixtures("pins_nothing")
@pytest.mark.parametrize("changed", [3000, 100])
def test_pinned_changes_count_as_the_power_of_two_that_they_take(changed: int) -> None:
    live = torch.zeros(3000)
    new = live.clone()
    new[:changed] = 1
    # values alone, or values and offsets
    taken = 16384 if changed == 3000 else 512 + 256
    for host, fits in ((taken - 1, False), (taken, True)):
        rank = Rank([live], True, Budget(device=0, host=host))
        with nullcontext() if fits else pytest.raises(Outgrown):
            rank.record([lambda weights: weights[0].copy_(new)])
        assert rank.recording.host_bytes == (taken if fits else 0)


@pytest.mark.usefixtures("pins_nothing")
@pytest.mark.parametrize("host", [0, 1 << 40], ids=["weights on the host", "weights on a device"])
def test_host_memory_taken_by_others_since_the_start_is_not_counted_on(host: int) -> None:
    left = 100_000
    live = torch.zeros(3000)
    budget = Budget(device=0 if host else 1 << 40, host=host, free=lambda: left)
    rank = Rank([live], True, budget)
    write = [lambda weights: weights[0].copy_(torch.ones(3000))]
    rank.record(write)
    rank.begin()
    left = 100
    if host:
        # torch keeps what the update before has pinned
        rank.begin()
        rank.record(write)
        rank = Rank([live], True, budget)
    rank.begin()
    with pytest.raises(Outgrown):
        rank.record(write)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.booleans())))
def test_intervals_are_a_set_of_positions(ranges: list[tuple[int, int, bool]]) -> None:
    intervals = Intervals()
    positions: set[int] = set()
    for start, end, adds in ranges:
        assert intervals.overlaps(start, end) == any(p in positions for p in range(start, end))
        if adds:
            intervals.add(start, end)
            positions |= set(range(start, end))
        else:
            intervals.discard(start, end)
            positions -= set(range(start, end))
        assert len(intervals) == len(positions)
        gaps = [p for gap in intervals.gaps(31) for p in range(*gap)]
        assert gaps == sorted(set(range(31)) - positions)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_view_adds_its_own_positions(data: st.DataObject) -> None:
    whole = torch.zeros(6, 8)
    intervals, is_there = Intervals(), torch.zeros(48, dtype=torch.bool)
    for _ in range(data.draw(st.integers(1, 4))):
        begin, end = sorted(data.draw(st.tuples(st.integers(0, 6), st.integers(0, 6))))
        first, last = sorted(data.draw(st.tuples(st.integers(0, 8), st.integers(0, 8))))
        step = data.draw(st.integers(1, 3))
        view = whole[begin:end, first:last:step]
        its = is_there.view(6, 8)[begin:end, first:last:step]
        assert intervals.has_view(view, 4) == bool(its.all())
        if data.draw(st.booleans()):
            intervals.add_view(view, 4)
            its.fill_(True)
        assert len(intervals) == int(is_there.sum())


def test_view_of_other_elements_adds_the_bytes_of_its_range() -> None:
    whole, intervals = torch.zeros(8), Intervals()
    intervals.add_view(whole.view(torch.uint8)[4:12], 4)
    assert [*intervals.gaps(8)] == [(0, 1), (3, 8)]
    assert intervals.has_view(whole.view(torch.int16)[3:6], 4)
    assert not intervals.has_view(whole.view(torch.int16)[3:7], 4)

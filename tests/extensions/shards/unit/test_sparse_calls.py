"""A rank refuses changes that do not fit what it serves, and receives nothing of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from sglang_inflight.extensions.shards.describing import Describing
from sglang_inflight.extensions.shards.wire import ShardsWire
from sglang_inflight.messages import PartsSource
from sglang_inflight.scheduler.plans.record import Kind
from sglang_inflight.vocabulary.errors import Refused
from sglang_inflight.vocabulary.regions import Region
from sglang_inflight.vocabulary.shard_buckets import FORMAT
from sglang_inflight.vocabulary.shards import Held, write_shards

SHAPE = (4, 3)
# the rank uses the last two rows of a tensor
PARTS = {"w": Region((2, 0), (2, 3))}
OWN_RANK = 1


class FakeGroup:
    """Fills each buffer with the next one of ``rows``."""

    rank = OWN_RANK

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows = rows
        self.is_taken = False

    def receives_on(self, device: torch.device) -> torch.device:
        return device

    def receive_each(
        self, expected: Iterator[tuple[torch.Tensor, Any]], *_: object, begin: object
    ) -> Iterator[Any]:
        for buffer, content in expected:
            buffer.copy_(self.rows.pop(0))
            yield content

    def mark_taken(self, _: str) -> None:
        self.is_taken = True


def row_of(at: list[int], values: list[float]) -> torch.Tensor:
    """Return a bucket's bytes: indices, and values at a multiple of 16."""
    indices = torch.tensor(at, dtype=torch.int32).view(torch.uint8)
    padding = torch.zeros(-len(indices) % 16, dtype=torch.uint8)
    return torch.cat([indices, padding, torch.tensor(values).bfloat16().view(torch.uint8)])


def receive(
    group: FakeGroup,
    *,
    shape: tuple[int, ...] = SHAPE,
    load_format: str | None = "sparse",
    **fields: Any,
) -> dict[str, torch.Tensor]:
    """Receive from a trainer of one rank that has all of a tensor of ``shape``."""
    held = write_shards([("w", Held("bfloat16", shape, (Region.whole(shape),)))])
    kinds = {"w": Kind(torch.Size(SHAPE), torch.bfloat16)}
    model: Any = SimpleNamespace(parts=PARTS, findings=SimpleNamespace(kinds=kinds))
    body: dict[str, object] = {
        "format": FORMAT,
        "held": [held.digest],
        "lines": {held.digest: held.lines},
        "wanted": {OWN_RANK: Describing().of([model]).digest},
        "bucket_bytes": 1 << 20,
    }
    source = PartsSource(
        wire="shards",
        group_name="g",
        body=msgspec.msgpack.encode(body | fields),
        load_format=load_format,
    )
    counter = SimpleNamespace(inc=lambda _: None)
    metrics: Any = SimpleNamespace(counter=lambda *_: counter)
    groups: Any = SimpleNamespace(get=lambda _: group)
    wire = ShardsWire(metrics)
    device = torch.device("cpu")
    return dict(wire(source, [model], PARTS, groups, device, lambda: None))


def changed(*counts: tuple[int, int]) -> dict[str, Any]:
    return {"changed": {OWN_RANK: [list(counts)]}}


def test_changes_come_by_positions_in_the_whole_tensor() -> None:
    group = FakeGroup([row_of([6, 11], [1.0, 2.0])])
    came = receive(group, **changed((0, 2)))
    assert came["w.indices"].tolist() == [6, 11]
    assert came["w.values"].tolist() == [1.0, 2.0]
    assert group.is_taken


def test_call_without_changes_brings_nothing() -> None:
    group = FakeGroup([])
    assert receive(group, **changed()) == {}
    assert group.is_taken


def test_tensor_that_changes_elsewhere_comes_without_an_element() -> None:
    """Its scales or its values may come whole to this rank."""
    group = FakeGroup([])
    came = receive(group, changed={OWN_RANK: [[]], OWN_RANK + 1: [[(0, 2)]]})
    assert {name: len(tensor) for name, tensor in came.items()} == {"w.indices": 0, "w.values": 0}
    assert group.is_taken


def test_some_tensors_come_whole() -> None:
    group = FakeGroup([torch.arange(6).bfloat16().view(torch.uint8)])
    came = receive(group, load_format=None, tensors=[0])
    assert came["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert receive(FakeGroup([]), load_format=None, tensors=[]) == {}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        # other rules would cut the buckets in another way
        ({"format": 1, **changed((0, 2))}, "by the rules 1"),
        ({}, "a sparse call says what has changed"),
        ({"load_format": None, **changed((0, 2))}, "a sparse call says what has changed"),
        ({"shape": (5, 3), **changed((0, 2))}, "has the shape"),
        ({"changed": {}}, "1 ranks of the trainer send, and 0 count"),
        ({"changed": {OWN_RANK: [[]], 2: [[(1, 2)]]}}, "has 1 tensors, and changes others"),
        (changed((0, 7)), "more elements have changed than the receiver uses"),
        ({"load_format": None, "tensors": [1]}, "has 1 tensors, and sends others"),
        ({"load_format": None, "tensors": [-1]}, "has 1 tensors, and sends others"),
    ],
)
def test_call_that_does_not_fit_is_refused_before_anything_is_received(
    fields: dict[str, Any], why: str
) -> None:
    group = FakeGroup([row_of([6, 11], [1.0, 2.0])])
    with pytest.raises(Refused, match=why):
        receive(group, **fields)
    assert (len(group.rows), group.is_taken) == (1, False)


@pytest.mark.parametrize("at", [[5, 6], [0, 11], [6, 3]])
def test_change_beside_the_ranks_part_is_refused(at: list[int]) -> None:
    """The load plan would leave it out."""
    group = FakeGroup([row_of(at, [1.0, 2.0])])
    with pytest.raises(Refused, match="changes of 'w' lie outside of the part"):
        receive(group, **changed((0, 2)))
    assert not group.is_taken

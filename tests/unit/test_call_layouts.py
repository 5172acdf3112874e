"""A rank's layouts: read from a call or kept, they give the tensors that the trainer packed."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from sglang_inflight.messages import FLATTENED_BUCKET, DistributedSource, TensorSource
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.sources import broadcast, call_layouts, stretch, tensors
from sglang_inflight.scheduler.update.sources.call_layouts import CallLayouts
from sglang_inflight.scheduler.update.sources.stretch import take_none
from sglang_inflight.vocabulary.errors import Refused
from sglang_inflight.vocabulary.layouts import layout_digest, layout_parts

CPU = torch.device("cpu")
Named = list[tuple[str, torch.Tensor]]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8]


def never() -> None:
    """Give nothing up."""


def named(count: int) -> Named:
    """Tensors of several dtypes and shapes, some of them empty, as a bucket has them."""
    shapes = [(2, 3), (), (0, 4), (5,)]
    found = [
        (f"w{n}", torch.arange(n, n + 6).to(DTYPES[n % 4])[: torch.Size(shapes[n % 3]).numel()])
        for n in range(count)
    ]
    found = [(name, each.reshape(shapes[n % 3])) for n, (name, each) in enumerate(found)]
    return sorted(found, key=lambda pair: -pair[1].itemsize)


def describe(sent: Named) -> dict[str, Any]:
    return {
        "names": [name for name, _ in sent],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in sent],
        "shapes": [[*tensor.shape] for _, tensor in sent],
    }


def new(sent: Named) -> dict[str, Any]:
    lists = [*describe(sent).values()]
    return {"layout_digest": layout_digest(*lists), "layout_parts": [*layout_parts(*lists)]}


def known(sent: Named) -> dict[str, Any]:
    return {"layout_digest": new(sent)["layout_digest"]}


def flat_of(sent: Named) -> torch.Tensor:
    flat: torch.Tensor = FlattenedTensorBucket(named_tensors=sent).get_flattened_tensor()
    return flat


def source_of(fields: dict[str, Any]) -> DistributedSource:
    return DistributedSource(group_name="g", load_format=FLATTENED_BUCKET, **fields)


def received(sent: Named, fields: dict[str, Any], layouts: CallLayouts) -> Named:
    """Fill the buckets that a rank expects, and return the tensors that it finds in them."""
    source = source_of(fields)
    layouts.take_in(source)
    found: Named = []
    for buffer, content in broadcast.expect(source, layouts, CPU):
        buffer.copy_(flat_of(sent))
        found += content(take_none)
    return found


def expect_equal(found: Named, sent: Named) -> None:
    assert [name for name, _ in found] == [name for name, _ in sent]
    for (_, ours), (_, theirs) in zip(found, sent, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)


@settings(deadline=None)
@given(st.integers(min_value=1, max_value=60), st.integers(min_value=1, max_value=8))
def test_kept_layout_gives_the_tensors_of_a_whole_one(count: int, most: int) -> None:
    sent, layouts = named(count), CallLayouts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stretch, "MOST_TENSORS", most)
        for fields in (describe(sent), new(sent), known(sent), known(sent)):
            expect_equal(received(sent, fields, layouts), sent)


def test_kept_layout_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, layouts = named(40), CallLayouts()
    received(sent, new(sent), layouts)
    # neither a dtype nor a geometry is looked at again
    monkeypatch.setattr(call_layouts, "_dtype", None)
    monkeypatch.setattr(call_layouts, "BucketLayout", None)
    expect_equal(received(sent, known(sent), layouts), sent)


def test_kept_layout_describes_broadcasts_of_single_tensors() -> None:
    sent, layouts = named(7), CallLayouts()
    layouts.take_in(source_of(new(sent)))
    source = DistributedSource(group_name="g", **known(sent))
    for each, (name, tensor) in zip(broadcast.expect(source, layouts, CPU), sent, strict=True):
        buffer, content = each
        [(found, received)] = content(take_none)
        assert (found, buffer.shape, buffer.dtype) == (name, tensor.shape, tensor.dtype)
        assert received is buffer


def test_layout_that_is_no_bucket_is_kept_for_single_tensors() -> None:
    sent = [("a", torch.ones(3, dtype=torch.uint8)), ("b", torch.ones(1))]
    layouts = CallLayouts()
    layouts.take_in(source_of(new(sent)))
    single = DistributedSource(group_name="g", **known(sent))
    assert len([*broadcast.expect(single, layouts, CPU)]) == 2
    with pytest.raises(Refused, match="b would begin at byte 3"):
        [*broadcast.expect(source_of(known(sent)), layouts, CPU)]


@pytest.mark.parametrize("shape", [[1 << 63], [1 << 70], [1 << 62, 8], [-1]])
def test_shape_of_no_tensor_is_refused(shape: list[int]) -> None:
    lists: dict[str, Any] = {"names": ["a"], "dtypes": ["uint8"], "shapes": [shape]}
    parts: dict[str, Any] = {"layout_parts": [*layout_parts(*lists.values())]}
    for fields in (lists, parts, parts | {"layout_digest": layout_digest(*lists.values())}):
        layouts, source = CallLayouts(), source_of(fields)
        layouts.take_in(source)
        with pytest.raises(Refused, match="shapes holds"):
            [*broadcast.expect(source, layouts, CPU)]


def test_forgotten_layout_is_refused() -> None:
    first, second, layouts = named(1), named(2), CallLayouts()
    received(first, new(first), layouts)
    received(second, new(second) | {"forgets_layouts": [known(first)["layout_digest"]]}, layouts)
    with pytest.raises(Refused, match="is not kept any more"):
        received(first, known(first), layouts)
    expect_equal(received(second, known(second), layouts), second)


def test_call_without_tensors_expects_no_broadcast() -> None:
    assert [*broadcast.expect(source_of(describe([])), CallLayouts(), CPU)] == []


# ---- payloads


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
    monkeypatch.setattr(tensors, "get_parallel", lambda: alone)
    monkeypatch.setattr(tensors, "count_replicas", lambda: 1)


def read(payload: object, fields: dict[str, Any], layouts: CallLayouts) -> Named:
    source = TensorSource(
        serialized_named_tensors=[pickle.dumps(payload)], load_format=FLATTENED_BUCKET, **fields
    )
    layouts.take_in(source)
    return [*tensors.read_tensors(source, layouts, CPU, never, UNPACED)]


def test_payload_without_metadata_is_cut_by_its_layout() -> None:
    sent, layouts = named(600), CallLayouts()
    for fields in (describe(sent), new(sent), known(sent)):
        expect_equal(read({"flattened_tensor": flat_of(sent)}, fields, layouts), sent)


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ([("w", torch.ones(1))], "alone"),
        ({"flattened_tensor": flat_of(named(3)), "metadata": []}, "alone"),
        ({"flattened_tensor": None}, "alone"),
        ({"flattened_tensor": flat_of(named(3))[:-1]}, "the layout has"),
        ({"flattened_tensor": torch.cat([flat_of(named(3))] * 2)[::2]}, "the layout has"),
        ({"flattened_tensor": flat_of(named(3)).view(torch.int8)}, "the layout has"),
    ],
    ids=["pairs", "metadata", "no tensor", "short", "with gaps", "another dtype"],
)
def test_payload_that_is_not_of_the_layout_is_refused(payload: object, why: str) -> None:
    if isinstance(payload, dict) and why == "the layout has":
        # pickling would make the gaps contiguous
        layout = CallLayouts().find(source_of(describe(named(3)))).bucket
        with pytest.raises(Refused, match=why):
            [*tensors._cut(payload, layout, FLATTENED_BUCKET)]
        return
    with pytest.raises(Refused, match=why):
        read(payload, describe(named(3)), CallLayouts())

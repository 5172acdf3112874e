"""The receiving bucket has the layout of the trainer's bucket."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from sglang_inflight.messages import DistributedSource
from sglang_inflight.scheduler.update.sources.broadcast import expect
from sglang_inflight.scheduler.update.sources.call_layouts import (
    BucketLayout,
    CallLayouts,
    Layout,
)
from sglang_inflight.scheduler.update.sources.stretch import take_none

CPU = torch.device("cpu")


def test_received_bucket_has_trainers_layout() -> None:
    sent = [
        ("a", torch.arange(6, dtype=torch.float32).reshape(2, 3)),
        ("b", torch.tensor(7, dtype=torch.bfloat16)),
        ("c", torch.zeros(0, 4, dtype=torch.bfloat16)),
        ("d", torch.arange(3, dtype=torch.uint8)),
    ]
    layout = [Layout(name, tensor.dtype, list(tensor.shape)) for name, tensor in sent]
    bucket = BucketLayout(layout)
    flat = torch.empty(bucket.nbytes, dtype=torch.uint8)
    flat.copy_(FlattenedTensorBucket(named_tensors=sent).get_flattened_tensor())
    received = [*bucket.named(flat)]
    assert [name for name, _ in received] == ["a", "b", "c", "d"]
    for (_, theirs), (_, ours) in zip(sent, received, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)


def test_misaligned_tensor_in_bucket_is_refused() -> None:
    layout = [Layout("a", torch.uint8, [3]), Layout("b", torch.float32, [1])]
    with pytest.raises(ValueError, match="b would begin at byte 3"):
        BucketLayout(layout)


@pytest.mark.parametrize(
    ("load_format", "broadcasts"),
    [
        (None, [["w.indices"], ["w.values"]]),
        ("sparse", [["w.indices"], ["w.values"]]),
        ("flattened_bucket", [["w.indices", "w.values"]]),
        ("sparse_bucket", [["w.indices", "w.values"]]),
    ],
)
def test_load_format_tells_the_tensors_of_each_broadcast(
    load_format: str | None, broadcasts: list[list[str]]
) -> None:
    source = DistributedSource(
        names=["w.indices", "w.values"],
        dtypes=["int32", "bfloat16"],
        shapes=[[3], [3]],
        group_name="trainer",
        load_format=load_format,
    )
    received = [tensors(take_none) for _, tensors in expect(source, CallLayouts(), CPU)]
    assert [[name for name, _ in tensors] for tensors in received] == broadcasts

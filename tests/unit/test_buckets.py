"""A sender's buckets: SGLang unpacks them to the tensors sent."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from sglang_inflight.client.buckets import Bucket, fill_buckets

Named = list[tuple[str, torch.Tensor]]


def unpack(bucket: Bucket) -> Named:
    """Unpack a bucket like a server."""
    received = FlattenedTensorBucket.empty(bucket.names, bucket.dtypes, bucket.shapes, "cpu")
    received.get_flattened_tensor().copy_(bucket.flat)
    tensors: Named = received.reconstruct_tensors()
    return tensors


def test_bucket_keeps_names_dtypes_and_values() -> None:
    torch.manual_seed(0)
    sent: Named = [
        ("bytes", torch.randint(0, 255, (3,), dtype=torch.uint8)),
        # an element of "floats" must not begin within an element of the bucket's dtype
        ("floats", torch.randn(2, 5)),
        ("transposed", torch.randn(4, 3, dtype=torch.bfloat16).t()),
        ("scalar", torch.tensor(2.5)),
        ("parameter", torch.nn.Parameter(torch.randn(7))),
        ("large", torch.randn(100)),
    ]
    buckets = list(fill_buckets(iter(sent), 64, "cpu"))
    assert [bucket.names for bucket in buckets] == [
        ["bytes"],
        ["floats", "transposed"],
        ["scalar", "parameter"],
        ["large"],
    ]
    received = [pair for bucket in buckets for pair in unpack(bucket)]
    for (name, tensor), (sent_name, sent_tensor) in zip(received, sent, strict=True):
        assert name == sent_name
        assert tensor.dtype == sent_tensor.dtype
        assert torch.equal(tensor, sent_tensor)


def test_no_tensors_make_no_bucket() -> None:
    assert not list(fill_buckets([], 64, "cpu"))


class Shard(torch.Tensor):
    """A shard, like a sharded trainer's ``DTensor``."""

    def full_tensor(self) -> torch.Tensor:
        raise NotImplementedError


def test_sharded_tensor_is_refused() -> None:
    part = torch.ones(2).as_subclass(Shard)
    with pytest.raises(TypeError, match="'w' is a shard of a tensor"):
        next(fill_buckets([("w", part)], 64, "cpu"))

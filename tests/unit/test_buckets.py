"""A sender's buckets: SGLang unpacks them to the tensors sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from sglang_inflight.client.buckets import Bucket, Piece, fill_buckets
from sglang_inflight.client.changes import Change

Named = list[tuple[str, torch.Tensor]]


def unpack(bucket: Bucket) -> Named:
    """Unpack a bucket like a server."""
    received = FlattenedTensorBucket.empty(bucket.names, bucket.dtypes, bucket.shapes, "cpu")
    received.get_flattened_tensor().copy_(bucket.flat)
    tensors: Named = received.reconstruct_tensors()
    return tensors


def whole(tensors: Named) -> Iterator[Piece]:
    return (Piece.whole(name, tensor) for name, tensor in tensors)


def test_bucket_keeps_names_dtypes_and_values() -> None:
    torch.manual_seed(0)
    sent: Named = [
        ("bytes", torch.randint(0, 255, (3,), dtype=torch.uint8)),
        # an element of "floats" must not begin after these three bytes
        ("floats", torch.randn(2, 5)),
        ("transposed", torch.randn(4, 3, dtype=torch.bfloat16).t()),
        ("scalar", torch.tensor(2.5)),
        ("parameter", torch.nn.Parameter(torch.randn(7))),
        ("large", torch.randn(100)),
    ]
    buckets = list(fill_buckets(whole(sent), 64, "cpu"))
    assert [bucket.names for bucket in buckets] == [
        ["floats", "bytes"],
        ["scalar", "parameter", "transposed"],
        ["large"],
    ]
    received = dict(pair for bucket in buckets for pair in unpack(bucket))
    for name, tensor in sent:
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


def test_halves_of_a_change_share_a_bucket_of_their_format() -> None:
    ones = torch.ones(3, dtype=torch.bfloat16)
    change = Change(torch.tensor([1, 3, 8], dtype=torch.int32), ones)
    pieces = [Piece.sparse("a", change), Piece.whole("b", ones), Piece.sparse("c", change)]
    buckets = list(fill_buckets(pieces, 2 * change.nbytes, "cpu"))
    assert sorted((bucket.load_format, bucket.names) for bucket in buckets) == [
        ("flattened_bucket", ["b"]),
        ("sparse_bucket", ["a.indices", "a.values"]),
        ("sparse_bucket", ["c.indices", "c.values"]),
    ]
    (together,) = fill_buckets([pieces[0], pieces[2]], 64, "cpu")
    assert together.names == ["a.indices", "c.indices", "a.values", "c.values"]
    for name, tensor in unpack(together):
        assert torch.equal(tensor, change.indices if name.endswith("indices") else ones)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
        torch.bool,
        torch.uint16,
        torch.bfloat16,
        torch.complex64,
    ],
)
@pytest.mark.parametrize(
    "beside",
    [
        [],
        [("other", torch.ones(2, dtype=torch.uint8)), ("nothing", torch.ones(0, dtype=torch.int))],
    ],
    ids=["alone", "beside others"],
)
def test_bucket_takes_every_dtype(dtype: torch.dtype, beside: Named) -> None:
    """Alone, as the only dtype of the bucket, and beside another one."""
    content = torch.tensor([1, 0] * 8, dtype=torch.uint8)
    tensors = [content.clone().view(dtype) for _ in range(3)]
    sent: Named = [(f"w{n}", tensor) for n, tensor in enumerate(tensors)]
    sent += [("empty", content[:0].view(dtype).reshape(0, 4)), *beside]
    (bucket,) = fill_buckets(whole(sent), 1 << 10, "cpu")
    received = unpack(bucket)
    assert sorted(name for name, _ in received) == sorted(name for name, _ in sent)
    for name, tensor in received:
        expected = dict(sent)[name]
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


def test_no_tensors_make_no_bucket() -> None:
    assert not list(fill_buckets([], 64, "cpu"))


class Shard(torch.Tensor):
    """A shard, like a sharded trainer's ``DTensor``."""

    def full_tensor(self) -> torch.Tensor:
        raise NotImplementedError


def test_sharded_tensor_is_refused() -> None:
    part = torch.ones(2).as_subclass(Shard)
    with pytest.raises(TypeError, match="'w' is a shard of a tensor"):
        list(fill_buckets(whole([("w", part)]), 64, "cpu"))

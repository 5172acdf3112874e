"""Tensors that a trainer broadcasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

from sglang_inflight.errors import Refused
from sglang_inflight.messages import FLATTENED_BUCKET, DistributedSource
from sglang_inflight.scheduler.update.sources.groups import Groups
from sglang_inflight.scheduler.update.sources.weights import Weights

# name, dtype and shape of a tensor that is to be broadcast
_Layout = tuple[str, torch.dtype, list[int]]
# what is broadcast at once, and the tensors that are in it then
_Received = tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]


def receive(
    source: DistributedSource, groups: Groups, device: torch.device, check: Callable[[], None]
) -> Weights:
    """Tensors as the trainer broadcasts them: in buckets, or one by one."""
    dtypes = [_dtype(name) for name in source.dtypes]
    if not len(source.names) == len(dtypes) == len(source.shapes):
        raise Refused(
            f"names, dtypes and shapes must be of one length, not {len(source.names)}, "
            f"{len(dtypes)} and {len(source.shapes)}"
        )
    if any(size < 0 for shape in source.shapes for size in shape):
        raise Refused("shapes holds a negative size")
    if source.load_format not in (None, FLATTENED_BUCKET):
        raise Refused(f"load_format {source.load_format!r} is not known for distributed updates")
    group = groups.get(source.group_name)
    expected = _broadcasts(source, dtypes, device)
    try:
        for buffer, tensors in expected:
            group.receive(buffer, check)
            yield from tensors
    except GeneratorExit:
        # one was refused: take in the rest, and the group stays in step
        with suppress(Refused):
            for buffer, _ in expected:
                group.receive(buffer, check)
            group.mark_taken(source.transfer_id)
        raise
    group.mark_taken(source.transfer_id)


def _broadcasts(
    source: DistributedSource, dtypes: list[torch.dtype], device: torch.device
) -> Iterator[_Received]:
    """What to receive into, one after the other, and the tensors that are in it then."""
    tensors = list(zip(source.names, dtypes, source.shapes, strict=True))
    if source.load_format != FLATTENED_BUCKET:
        for name, dtype, shape in tensors:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            yield tensor, [(name, tensor)]
        return
    for part in _split(tensors, source.bucket_bytes):
        try:
            received = _empty_bucket(part, device)
        except ValueError as error:
            raise Refused(f"not a {FLATTENED_BUCKET}: {error}") from error
        yield received


def _empty_bucket(part: list[_Layout], device: torch.device) -> _Received:
    """One to receive into. Raises ``ValueError`` where tensors cannot lie so."""
    metadata = []
    offset = 0
    for name, dtype, shape in part:
        if offset % dtype.itemsize:
            raise ValueError(f"{name} would begin at byte {offset}, amid a {dtype}")
        size = math.prod(shape) * dtype.itemsize
        metadata.append(
            FlattenedTensorMetadata(
                name=name,
                shape=torch.Size(shape),
                dtype=dtype,
                start_idx=offset,
                end_idx=offset + size,
                numel=size,
            )
        )
        offset += size
    flat = torch.empty(offset, dtype=torch.uint8, device=device)
    bucket = FlattenedTensorBucket(flattened_tensor=flat, metadata=metadata)
    return flat, bucket.reconstruct_tensors()


def _split(tensors: list[_Layout], most: int | None) -> Iterator[list[_Layout]]:
    """Buckets as trainers make them: the tensor that goes beyond ``most`` bytes is the last."""
    part: list[_Layout] = []
    nbytes = 0
    for layout in tensors:
        _, dtype, shape = layout
        part.append(layout)
        nbytes += math.prod(shape) * dtype.itemsize
        if most is not None and nbytes > most:
            yield part
            part, nbytes = [], 0
    if part:
        yield part


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise Refused(f"dtypes holds {name!r}, which is no dtype")
    return dtype

"""Reads tensors from a payload serialized by a trainer."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch
from sglang.srt.model_executor.model_runner_components.weight_updater import (
    LocalSerializedTensor,
)
from sglang.srt.utils.common import normalize_serialized_named_tensor_payload
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

from sglang_inflight.messages import BUCKETS, Payload, TensorSource
from sglang_inflight.scheduler.update.rate import RateLimit, paced
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.batches import Packed, Weights
from sglang_inflight.scheduler.update.sources.call_layouts import BucketLayout, CallLayouts
from sglang_inflight.scheduler.update.sources.regular_file import RegularFile, Stream
from sglang_inflight.scheduler.update.sources.stretch import Take, rest_of, take_none
from sglang_inflight.scheduler.update.sources.unpickling import unpickle
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.topology import count_replicas, own_index, own_replica
from sglang_inflight.vocabulary.errors import Refused, describe

# ctypes, unlike ``mmap.madvise``, releases the interpreter during the call
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

# small tensors whose pages are unmapped together
_UNMAPPED_BYTES = 1 << 20


def read_tensors(
    source: TensorSource,
    layouts: CallLayouts,
    device: torch.device,
    check: Callable[[], None],
    rate_limit: RateLimit,
    take: Take = take_none,
) -> Weights:
    """Yield the tensors serialized for this rank, moved to ``device`` one by one.

    ``take`` gets the stretches of a bucket with a layout first.

    A payload may be a handle to another process's memory, and that process may be stopped or gone.
    So an ``AbandonableThread`` opens it. ``check`` raises when it is time to give up.
    """
    bucket = _layout_of(source, layouts)
    weights: Iterable[tuple[str, Any]]
    weights = _deserialize(source, bucket, device, check, rate_limit, take)
    if bucket is None:
        weights = release_pages(weights)
    for name, tensor in weights:
        yield name, tensor.to(device) if isinstance(tensor, torch.Tensor) else tensor


def _layout_of(source: TensorSource, layouts: CallLayouts) -> BucketLayout | None:
    """Return the bucket's layout, or None if each payload describes its own tensors."""
    if not source.has_layout:
        return None
    try:
        return layouts.find(source).bucket
    except ValueError as error:
        raise Refused(f"not a {source.load_format}: {error}") from error


def _deserialize(
    source: TensorSource,
    bucket: BucketLayout | None,
    device: torch.device,
    check: Callable[[], None],
    rate_limit: RateLimit,
    take: Take,
) -> Weights:
    if torch.cuda.is_available():
        # For handles to CUDA memory, as in SGLang's reader. It also changes this process's
        # pickling of tensors, which then fails without CUDA.
        monkey_patch_torch_reductions()
    payload = _own_payload(source.serialized_named_tensors)
    rest = partial(rate_limit.for_another_thread().spend, 0)
    with AbandonableThread(check, device) as thread:
        named = thread.do(lambda: _unpickle(payload, rest))
        if bucket is not None:
            yield from _cut(named, bucket, source.load_format, take)
            return
        if source.load_format in BUCKETS:
            yield from _unflatten(named, source.load_format)
            return
        if not isinstance(named, list):
            raise Refused(
                "serialized_named_tensors must hold a list of (name, tensor) pairs, "
                f"not a {type(named).__name__}"
            )
        # one by one out of the list: a full list would keep all memory to the end
        named.reverse()
        while named:
            pair = named.pop()
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise Refused("serialized_named_tensors must hold a list of (name, tensor) pairs")
            name, tensor = pair
            if isinstance(tensor, LocalSerializedTensor):
                tensor = thread.do(partial(_unpickle, _of_rank(tensor), rest))
            yield name, tensor


def _of_rank(tensor: LocalSerializedTensor) -> bytes:
    """Return this rank's payload from one for each tensor-parallel rank."""
    payloads, rank = getattr(tensor, "values", None), get_parallel().tp_rank
    if not isinstance(payloads, list | tuple) or rank >= len(payloads):
        raise Refused(f"a LocalSerializedTensor holds no payload for rank {rank}")
    try:
        return normalize_serialized_named_tensor_payload(payloads[rank])
    except (TypeError, ValueError) as error:
        raise Refused(f"a LocalSerializedTensor holds no payload: {describe(error)}") from error


def _unpickle(payload: Payload, rest: Callable[[], None] = lambda: None) -> Any:
    try:
        return _read(payload, rest)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"serialized_named_tensors cannot be unpickled: {describe(error)}") from error


def _read(payload: Payload, rest: Callable[[], None]) -> Any:
    if isinstance(payload, bytes):
        return unpickle(payload, rest)
    with closing(RegularFile(payload.path, "the payload")) as file, Stream.of(file) as stream:
        return unpickle(stream, rest)


def _own_payload(payloads: list[Payload]) -> Payload:
    """Return this rank's payload; the number of ``payloads`` says how ranks are counted.

    Some payloads can be read only once, such as a handle to shared memory. So replicas, and the
    stages of a pipeline, need payloads of their own, unless the trainer's can be read again. The
    order is SGLang's order of ranks: by replica, then by stage, then by tensor-parallel rank.
    """
    parallel = get_parallel()
    ranks, stages = parallel.tp_size, parallel.pp_size
    replicas = count_replicas()
    taken = {ranks: (parallel.tp_rank, "one for each tensor-parallel rank")}
    if replicas > 1:
        own = own_replica() * ranks + parallel.tp_rank
        taken[ranks * replicas] = own, "one for each tensor-parallel rank of each replica"
    if stages > 1:
        taken[ranks * stages * replicas] = own_index(), "one for each rank of each stage"
    if len(payloads) in taken:
        own, _ = taken[len(payloads)]
        return payloads[own]
    raise Refused(
        f"serialized_named_tensors holds {len(payloads)} payloads; this server takes "
        + ", or ".join(f"{count}, {what}" for count, (_, what) in taken.items())
    )


def _unflatten(bucket: Any, load_format: str | None) -> Weights:
    try:
        packed = Packed(bucket["flattened_tensor"])
        tensors = [
            (m.name, packed.view(m.start_idx, m.end_idx, m.dtype, m.shape))
            for m in paced(bucket["metadata"])
        ]
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Refused(f"not a {load_format}: {error!r}") from error
    yield from tensors


def _cut(
    payload: Any, bucket: BucketLayout, load_format: str | None, take: Take = take_none
) -> Weights:
    """Yield the tensors of a payload without metadata, and unmap the pages of those taken."""
    flat = payload.get("flattened_tensor") if isinstance(payload, dict) else None
    if not isinstance(flat, torch.Tensor) or len(payload) > 1:
        raise Refused(
            f'not a {load_format}: beside a layout a payload holds {{"flattened_tensor": …}} alone'
        )
    is_row = flat.dtype == torch.uint8 and flat.dim() == 1 and flat.is_contiguous()
    if not is_row or len(flat) != bucket.nbytes:
        raise Refused(
            f"not a {load_format}: flattened_tensor is a {flat.dtype} of shape {[*flat.shape]}, "
            f"and the layout has {bucket.nbytes} bytes"
        )
    pages = _Pages()
    for stretch, row in bucket.rows(flat):
        yield from rest_of(stretch, row, take)
        pages.add(row)
    pages.release()


def release_pages(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``weights``, and unmap the pages of those that were taken.

    Torch unmaps a sender's whole memory when its last tensor goes, some 40 ms per GB, and holds
    the interpreter meanwhile. The loop needs the interpreter and would stand still. If the pages
    went before, piece by piece, nothing is left to unmap. Small neighbours go together: a system
    call for each would cost more than their reading.

    Pages of shared memory come back at the next read: nothing is lost if somebody still holds the
    tensor. Other memory would be lost, and is left alone.
    """
    pages = _Pages()
    for name, tensor in weights:
        yield name, tensor
        if isinstance(tensor, torch.Tensor):
            pages.add(tensor)
    pages.release()


class _Pages:
    """Read neighbours in one shared storage, which is held until their pages are unmapped."""

    def __init__(self) -> None:
        self._storage: torch.UntypedStorage | None = None
        # addresses
        self._start = self._end = 0

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if not (tensor.is_cpu and storage.is_shared()):
            self.release()
            return
        start = tensor.data_ptr()
        # an expanded tensor counts more bytes than its storage has
        end = min(start + tensor.nbytes, storage.data_ptr() + storage.nbytes())
        if self._has_beside(storage, start):
            self._end = max(end, self._end)
        else:
            self.release()
            self._storage, self._start, self._end = storage, start, end
        if self._end - self._start >= _UNMAPPED_BYTES:
            self.release()

    def _has_beside(self, storage: torch.UntypedStorage, start: int) -> bool:
        if self._storage is None or self._storage._cdata != storage._cdata:
            return False
        return self._start <= start <= self._end + mmap.PAGESIZE

    def release(self) -> None:
        if self._storage is None:
            return
        start = self._start // mmap.PAGESIZE * mmap.PAGESIZE
        # the kernel refuses this for locked memory, and the pages stay
        _madvise(start, max(0, self._end - start), mmap.MADV_DONTNEED)
        self._storage = None

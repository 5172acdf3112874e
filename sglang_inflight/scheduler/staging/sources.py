"""Where tensors come from: one function for each kind of source.

Each yields ``(name, tensor)`` pairs, on the staging thread. What it yields may be the
caller's memory, and stays valid until the next pair is asked for.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

from sglang_inflight.errors import Refused
from sglang_inflight.messages import (
    FLATTENED_BUCKET,
    DiskSource,
    DistributedSource,
    TensorSource,
)
from sglang_inflight.scheduler.staging.groups import Groups
from sglang_inflight.scheduler.staging.unmapping import unmapping

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

Weights = Generator[tuple[str, torch.Tensor], None, None]
# name, dtype and shape of a tensor that is to be broadcast
_Layout = tuple[str, torch.dtype, list[int]]


def read_disk(source: DiskSource, runner: ModelRunner, *, of_draft: bool) -> Weights:
    """A checkpoint's tensors, on the host, read file by file.

    A draft takes what it has in common with its target's checkpoint, of whatever kind.
    """
    path = Path(source.model_path)
    if not path.is_dir():
        raise Refused(f"model_path {source.model_path!r} is not a directory on the server")
    if not of_draft:
        _check_architecture(path, runner)
    model_config = copy.copy(runner.model_config)
    model_config.model_path = source.model_path
    try:
        load_config = LoadConfig(
            load_format=source.load_format or LoadFormat.AUTO,
            # the loader's own threads would take the cores from decoding
            model_loader_extra_config={"enable_multithread_load": False},
        )
        loader = get_model_loader(load_config, model_config)
        if not isinstance(loader, DefaultModelLoader):
            raise ValueError(f"it loads by {type(loader).__name__}, which cannot update")
        files = DefaultModelLoader.Source.init_new(model_config, runner.model)
        weights = loader._get_weights_iterator(files)
    except ValueError as error:
        raise Refused(f"load_format {source.load_format!r}: {error}") from error
    try:
        yield from unmapping(weights)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"checkpoint {source.model_path!r} cannot be read: {error}") from error


def _check_architecture(path: Path, runner: ModelRunner) -> None:
    config = path / "config.json"
    if not config.is_file():
        return
    try:
        found = json.loads(config.read_text()).get("architectures")
    except (ValueError, AttributeError) as error:
        raise Refused(f"{config.name} in {str(path)!r} cannot be read: {error}") from error
    served = runner.model_config.hf_config.architectures
    if found and served and found != served:
        raise Refused(
            f"checkpoint {str(path)!r} is a {', '.join(found)}; this server serves a "
            f"{', '.join(served)}"
        )


def read_tensors(source: TensorSource, device: torch.device) -> Weights:
    """Tensors that a trainer serialized for this rank, moved to ``device`` one by one."""
    for name, tensor in unmapping(_deserialize(source)):
        yield name, tensor.to(device) if isinstance(tensor, torch.Tensor) else tensor


def _deserialize(source: TensorSource) -> Weights:
    if torch.cuda.is_available():
        # as upstream's reader does, for handles to CUDA memory; it also changes how this process
        # writes tensors, and without CUDA it then fails at each one
        monkey_patch_torch_reductions()
    payload = _own_payload(source.serialized_named_tensors)
    try:
        named = MultiprocessingSerializer.deserialize(payload)
    except Exception as error:
        raise Refused(f"serialized_named_tensors cannot be unpickled: {error}") from error
    if source.load_format == FLATTENED_BUCKET:
        yield from _unflatten(named)
        return
    if not isinstance(named, list):
        raise Refused(
            "serialized_named_tensors must hold a list of (name, tensor) pairs, "
            f"not a {type(named).__name__}"
        )
    # one by one out of the list, which would keep all their memory to the end
    named.reverse()
    while named:
        pair = named.pop()
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise Refused("serialized_named_tensors must hold a list of (name, tensor) pairs")
        name, tensor = pair
        if hasattr(tensor, "get"):  # LocalSerializedTensor: a payload per tensor-parallel rank
            tensor = tensor.get(get_parallel().tp_rank)
        yield name, tensor


def _own_payload(payloads: list[bytes]) -> bytes:
    """One payload per tensor-parallel rank, or one for each rank of each replica.

    A payload may be readable once only (it can be a handle to shared memory), so
    replicas need payloads of their own, unless the trainer's can be read again.
    """
    parallel = get_parallel()
    ranks = parallel.tp_size
    replicas = 1 if parallel.attn_dp_enabled else parallel.dp_size
    if len(payloads) == ranks * replicas:
        return payloads[(parallel.dp_rank or 0) * ranks + parallel.tp_rank]
    if len(payloads) == ranks:
        return payloads[parallel.tp_rank]
    raise Refused(
        f"serialized_named_tensors holds {len(payloads)} payloads; this server takes "
        f"{ranks}, one for each tensor-parallel rank"
        + (f", or {ranks * replicas}, one for each rank of each replica" if replicas > 1 else "")
    )


def _unflatten(bucket: Any) -> Weights:
    try:
        metadata = [
            FlattenedTensorMetadata(
                name=m.name,
                shape=m.shape,
                dtype=m.dtype,
                start_idx=m.start_idx,
                end_idx=m.end_idx,
                numel=m.numel,
            )
            for m in bucket["metadata"]
        ]
        tensors = FlattenedTensorBucket(
            flattened_tensor=bucket["flattened_tensor"], metadata=metadata
        ).reconstruct_tensors()
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Refused(f"not a {FLATTENED_BUCKET}: {error!r}") from error
    yield from tensors


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
            group.note_taken(source.transfer_id)
        raise
    group.note_taken(source.transfer_id)


def _broadcasts(
    source: DistributedSource, dtypes: list[torch.dtype], device: torch.device
) -> Iterator[tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]]:
    """What to receive into, one after the other, and the tensors that are in it then."""
    tensors = list(zip(source.names, dtypes, source.shapes, strict=True))
    if source.load_format != FLATTENED_BUCKET:
        for name, dtype, shape in tensors:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            yield tensor, [(name, tensor)]
        return
    for part in _split(tensors, source.bucket_bytes):
        try:
            bucket = FlattenedTensorBucket.empty(*zip(*part, strict=True), device)
        except ValueError as error:
            raise Refused(f"not a {FLATTENED_BUCKET}: {error}") from error
        yield bucket.get_flattened_tensor(), bucket.reconstruct_tensors()


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

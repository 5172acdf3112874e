"""Receives tensors broadcast by a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from sglang_inflight.messages import BUCKETS, OF_CHECKPOINT, DistributedSource
from sglang_inflight.scheduler.update.rate import paced
from sglang_inflight.scheduler.update.sources.batches import Layout, Packed, Weights, read_layouts
from sglang_inflight.scheduler.update.sources.groups import Groups
from sglang_inflight.vocabulary.errors import Refused

# the buffer of one broadcast, and the tensors in it once it is received
Received = tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]


def receive(
    source: DistributedSource, groups: Groups, device: torch.device, check: Callable[[], None]
) -> Weights:
    """Yield tensors as the trainer broadcasts them: in buckets, or one by one."""
    layouts = _layouts_of(source)
    group = groups.get(source.group_name)
    expected = _broadcasts(source, layouts, group.receives_on(device))
    received = group.receive_each(expected, check, source.transfer_id)
    try:
        for tensors in received:
            yield from tensors
    except GeneratorExit:
        # a tensor was refused: receive the rest, so the group stays in step
        with suppress(Refused):
            for _ in received:
                pass
            group.mark_taken(source.transfer_id)
        raise
    group.mark_taken(source.transfer_id)


def expect(source: DistributedSource, device: torch.device) -> Iterator[Received]:
    """Return the buffers to receive into, in order, with the tensors in each.

    Raise ``Refused`` if ``source`` describes no tensors.
    """
    return _broadcasts(source, _layouts_of(source), device)


def _layouts_of(source: DistributedSource) -> list[Layout]:
    layouts = read_layouts(source.names, source.dtypes, source.shapes)
    if source.load_format not in OF_CHECKPOINT:
        raise Refused(f"load_format {source.load_format!r} is not known for distributed updates")
    return layouts


def post_ahead(
    source: DistributedSource, groups: Groups, device: torch.device, stream: Any
) -> None:
    """Post a call's first broadcasts, on the loop's thread at the call's arrival: see ``Group``.

    ``stream`` is the staging thread's, or None before it has one. The buffers are that stream's
    memory, and NCCL writes them after the stream's work so far.
    """
    if stream is None:
        groups.begin_transfer(source, None)
        return
    with torch.get_device_module(device).stream(stream), torch.no_grad():
        groups.begin_transfer(source, partial(expect, source, device))


def _broadcasts(
    source: DistributedSource, layouts: list[Layout], device: torch.device
) -> Iterator[Received]:
    if source.load_format not in BUCKETS:
        for layout in layouts:
            tensor = torch.empty(layout.shape, dtype=layout.dtype, device=device)
            yield tensor, [(layout.name, tensor)]
        return
    for part in _split(layouts, source.bucket_bytes):
        try:
            received = _empty_bucket(part, device)
        except ValueError as error:
            raise Refused(f"not a {source.load_format}: {error}") from error
        yield received


def _empty_bucket(part: list[Layout], device: torch.device) -> Received:
    """Return a buffer and its tensors. Raise ``ValueError`` if a tensor would be unaligned."""
    flat = torch.empty(sum(each.nbytes for each in part), dtype=torch.uint8, device=device)
    packed = Packed(flat)
    tensors = []
    start = 0
    for layout in paced(part):
        if start % layout.dtype.itemsize:
            raise ValueError(f"{layout.name} would begin at byte {start}, amid a {layout.dtype}")
        end = start + layout.nbytes
        tensors.append((layout.name, packed.view(start, end, layout.dtype, layout.shape)))
        start = end
    return flat, tensors


def _split(layouts: list[Layout], most: int | None) -> Iterator[list[Layout]]:
    """Yield buckets like the trainer's: a bucket ends with the tensor that exceeds ``most``."""
    part: list[Layout] = []
    nbytes = 0
    for layout in layouts:
        part.append(layout)
        nbytes += layout.nbytes
        if most is not None and nbytes > most:
            yield part
            part, nbytes = [], 0
    if part:
        yield part

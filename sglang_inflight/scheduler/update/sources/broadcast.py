"""Receives tensors broadcast by a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from sglang_inflight.messages import BUCKETS, OF_CHECKPOINT, DistributedSource
from sglang_inflight.scheduler.groups.groups import Groups
from sglang_inflight.scheduler.update.sources.batches import Weights
from sglang_inflight.scheduler.update.sources.call_layouts import (
    BucketLayout,
    CallLayout,
    CallLayouts,
    Layout,
)
from sglang_inflight.scheduler.update.sources.stretch import Take, take_none
from sglang_inflight.vocabulary.errors import Refused
from sglang_inflight.vocabulary.layouts import MOST_LISTED

# The buffer of one broadcast. Once it is received, the other yields its tensors, less those that a
# load plan takes.
Received = tuple[torch.Tensor, Callable[[Take], Iterable[tuple[str, torch.Tensor]]]]


def receive(
    source: DistributedSource,
    groups: Groups,
    layouts: CallLayouts,
    device: torch.device,
    check: Callable[[], None],
    take: Take = take_none,
) -> Weights:
    """Yield tensors as the trainer broadcasts them, in buckets or one by one.

    ``take`` gets the stretches of buckets first.
    """
    layout = _layout_of(source, layouts)
    group = groups.get(source.group_name)
    expected = _broadcasts(source, layout, group.receives_on(device))
    received = group.receive_each(expected, check, source.transfer_id)
    try:
        for tensors in received:
            yield from tensors(take)
    except GeneratorExit:
        # a tensor was refused: receive the rest, so the group stays in step
        with suppress(Refused):
            for _ in received:
                pass
            group.mark_taken(source.transfer_id)
        raise
    group.mark_taken(source.transfer_id)


def expect(
    source: DistributedSource, layouts: CallLayouts, device: torch.device
) -> Iterator[Received]:
    """Return the buffers to receive into, in order, with the tensors in each.

    Raise ``Refused`` if ``source`` describes no tensors.
    """
    return _broadcasts(source, _layout_of(source, layouts), device)


def _layout_of(source: DistributedSource, layouts: CallLayouts) -> CallLayout:
    layout = layouts.find(source)
    if source.load_format not in OF_CHECKPOINT:
        raise Refused(f"load_format {source.load_format!r} is not known for distributed updates")
    return layout


def post_ahead(
    source: DistributedSource,
    groups: Groups,
    layouts: CallLayouts,
    device: torch.device,
    stream: Any,
) -> None:
    """Post a call's first broadcasts, on the loop's thread at the call's arrival: see ``Group``.

    ``stream`` is the staging thread's, or None before it has one. The buffers are that stream's
    memory, and NCCL writes them after the stream's work so far.
    """
    if stream is None or not _is_quickly_expected(source):
        groups.begin_transfer(source, None)
        return
    with torch.get_device_module(device).stream(stream), torch.no_grad():
        groups.begin_transfer(source, partial(expect, source, layouts, device))


def _is_quickly_expected(source: DistributedSource) -> bool:
    """Return whether the loop may read the layout: few names, or a kept bucket.

    The front end decides it for all ranks: they post the same broadcasts ahead.
    """
    if source.layout_digest is None:
        return not source.layout_parts and len(source.names) <= MOST_LISTED
    return not source.layout_parts and source.load_format in BUCKETS


def _broadcasts(
    source: DistributedSource, layout: CallLayout, device: torch.device
) -> Iterator[Received]:
    if source.load_format not in BUCKETS:
        for each in layout.tensors():
            tensor = torch.empty(each.shape, dtype=each.dtype, device=device)
            yield tensor, partial(_alone, each.name, tensor)
        return
    try:
        for bucket in _split(layout, source.bucket_bytes):
            flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
            yield flat, partial(bucket.named, flat)
    except ValueError as error:
        raise Refused(f"not a {source.load_format}: {error}") from error


def _alone(name: str, tensor: torch.Tensor, take: Take) -> Iterable[tuple[str, torch.Tensor]]:
    return [(name, tensor)]


def _split(layout: CallLayout, most: int | None) -> Iterator[BucketLayout]:
    """Yield buckets like the trainer's: a bucket ends with the tensor that exceeds ``most``.

    Raise ``ValueError`` if a tensor would be unaligned.
    """
    if most is None and layout.names:
        yield layout.bucket
        return
    part: list[Layout] = []
    nbytes = 0
    for each in layout.tensors():
        part.append(each)
        nbytes += each.nbytes
        if most is not None and nbytes > most:
            yield BucketLayout(part)
            part, nbytes = [], 0
    if part:
        yield BucketLayout(part)

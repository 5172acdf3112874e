"""Reads the tensors of an update's calls: one way for each kind of source."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from sglang_inflight.joints import Joint
from sglang_inflight.messages import (
    DiskSource,
    DistributedSource,
    GPUMemorySource,
    IPCSource,
    LoadedSource,
    PartsSource,
    SparseFolderSource,
    TensorSource,
    has_custom_loader,
    is_sparse,
)
from sglang_inflight.metrics import Metrics
from sglang_inflight.scheduler.groups.groups import Groups
from sglang_inflight.scheduler.update.checks.arrivals import Arrivals
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.sources.batches import (
    MOST_BYTES,
    Batches,
    Weights,
    in_parts,
    one_batch,
    with_whole_modules,
)
from sglang_inflight.scheduler.update.sources.broadcast import receive
from sglang_inflight.scheduler.update.sources.call_layouts import CallLayouts
from sglang_inflight.scheduler.update.sources.checkpoint_engine import Listings, receive_ipc
from sglang_inflight.scheduler.update.sources.disk import Folder, read_disk
from sglang_inflight.scheduler.update.sources.gpu_memory import GPUMemory
from sglang_inflight.scheduler.update.sources.safetensors_file import EVERYTHING, Indexes, Wanted
from sglang_inflight.scheduler.update.sources.sparse_folder import read_sparse_folder
from sglang_inflight.scheduler.update.sources.stretch import Stretch, Take, take_none
from sglang_inflight.scheduler.update.sources.tensors import read_tensors
from sglang_inflight.scheduler.update.update import Update
from sglang_inflight.vocabulary.errors import Refused
from sglang_inflight.vocabulary.regions import Region
from sglang_inflight.vocabulary.sparse import tensor_of


class ReadsDisk(Protocol):
    """A model whose part of a checkpoint on disk is read."""

    runner: Any

    def refuse_another(self, folder: Folder, warn: Callable[[str], None]) -> None:
        """Raise ``Refused`` if ``folder`` has another model's checkpoint."""

    @property
    def wanted(self) -> Wanted:
        """The stored tensors that the open update uses."""

    @property
    def parts(self) -> Mapping[str, Region]:
        """The part of each tensor that the open update uses."""


Model = TypeVar("Model", bound=ReadsDisk)


class ReadParts(Protocol):
    """Receives parts of tensors by one wire, on the staging thread."""

    def __call__(
        self,
        source: PartsSource,
        models: Sequence[Any],
        parts: Mapping[str, Region],
        groups: Groups,
        device: torch.device,
        check: Callable[[], None],
    ) -> Weights:
        """Yield each tensor of one call that has ``parts``, as large as its part.

        Of a sparse ``source`` yield both halves of each tensor that has changed in its part
        (``vocabulary/sparse.py``), by positions in the whole tensor.

        The tensors stay readable until the call's end.

        ``parts``: what this rank uses of each tensor, for the ``models`` of the call (class
        ``ShadowedModel``). ``check`` raises to give up.
        """


# each makes a wire of one rank, and names it
WIRES: Joint[Callable[[Metrics], tuple[str, ReadParts]]] = Joint("wires")


class Reader:
    """The sources of one rank. The staging thread owns it, but for ``stop_reading``."""

    def __init__(
        self, groups: Groups, device: torch.device, rate_limit: RateLimit, metrics: Metrics
    ) -> None:
        # those of the tensors in calls
        self.layouts = CallLayouts()
        # those of checkpoints on disk
        self._indexes = Indexes()
        # those of a checkpoint engine
        self._listings = Listings()
        self._groups = groups
        self._device = device
        self._rate_limit = rate_limit
        self._gpu_memory = GPUMemory(device)
        self._wires = dict(make(metrics) for make in WIRES)
        self._ways: dict[type, Callable[[Any, Update, Take], Batches]] = {
            TensorSource: self._from_tensors,
            DistributedSource: self._from_broadcasts,
            GPUMemorySource: self._from_gpu_memory,
            IPCSource: self._from_ipc,
        }

    def stop_reading(self) -> None:
        """Release the sender's memory; the update receives nothing more."""
        self._gpu_memory.stop_reading()

    def read_for_each(
        self,
        models: Sequence[Model],
        update: Update,
        source: LoadedSource,
        arrivals: Arrivals,
        require_base: Callable[[tuple[str, ...]], None],
        take: Callable[[Model, Stretch, torch.Tensor | None], Sequence[int]],
    ) -> Generator[tuple[Model, Weights], None, None]:
        """Yield each model with the tensors of one loader call, in the order of the calls.

        ``take`` gets a model's stretches first: see ``Take``.

        A target and its drafts load the same tensors, but most sources deliver them once.
        ``require_base`` raises ``Conflict`` unless the served weights have one of some digests.
        """
        if isinstance(source, DiskSource):
            yield from self._from_disk(models, update, source, arrivals, take)
            return
        if isinstance(source, PartsSource):
            yield from self._by_parts(models, update, source)
            return
        if isinstance(source, SparseFolderSource):
            batches = self._from_sparse_folder(models, update, source, require_base)
        else:
            is_alone = len(models) == 1 and not arrivals.is_asked
            batches = self.read_once(
                source, update, partial(take, models[0]) if is_alone else take_none
            )
        # a custom loader may need all tensors of a call at once, and a sparse tensor both its
        # halves
        is_one = has_custom_loader(source) or is_sparse(source)
        most = math.inf if is_one else MOST_BYTES
        with closing(batches):
            for batch in batches:
                if len(models) == 1:
                    yield models[0], arrivals.watch(batch)
                    continue
                for part in in_parts(arrivals.watch(batch), most):
                    for model in models:
                        yield model, (pair for pair in part)
        arrivals.end_reading()

    def read_once(self, source: LoadedSource, update: Update, take: Take) -> Batches:
        """Yield the tensors of a source that delivers them once, less those that ``take`` takes."""
        return self._ways[type(source)](source, update, take)

    def _from_disk(
        self,
        models: Sequence[Model],
        update: Update,
        source: DiskSource,
        arrivals: Arrivals,
        take: Callable[[Model, Stretch, torch.Tensor | None], Sequence[int]],
    ) -> Iterator[tuple[Model, Weights]]:
        for model in models:
            weights = read_disk(
                source,
                model.runner,
                refuse_another=partial(model.refuse_another, warn=update.warn),
                check=update.check,
                rate_limit=self._rate_limit,
                # a digest is of every byte
                wants=EVERYTHING if arrivals.is_asked else model.wanted,
                take=take_none if arrivals.is_asked else partial(take, model),
                indexes=self._indexes,
            )
            yield model, arrivals.watch(weights)
            arrivals.end_reading()

    def _by_parts(
        self, models: Sequence[Model], update: Update, source: PartsSource
    ) -> Iterator[tuple[Model, Weights]]:
        """Yield the parts of tensors. A target and a draft may use different ones of a tensor."""
        if (wire := self._wires.get(source.wire)) is None:
            raise Refused(f"parts of tensors come by {source.wire!r}, which is not known here")
        of_each = [model.parts for model in models]
        parts = parts_of_all(of_each)
        received = wire(source, models, parts, self._groups, self._device, update.check)
        if len(models) == 1:
            yield models[0], received
            return
        with closing(received):
            # one call has both halves of a tensor
            for batch in in_parts(received, math.inf if is_sparse(source) else MOST_BYTES):
                for model, own in zip(models, of_each, strict=True):
                    if is_sparse(source):
                        yield model, _halves_of(batch, own)
                    else:
                        yield model, _cut_out(batch, parts, own)

    def _from_sparse_folder(
        self,
        models: Sequence[Model],
        update: Update,
        source: SparseFolderSource,
        require_base: Callable[[tuple[str, ...]], None],
    ) -> Batches:
        def refuse_another(folder: Folder) -> None:
            for model in models:
                model.refuse_another(folder, update.warn)

        return one_batch(
            read_sparse_folder(
                source,
                self._device,
                base_version=update.base_version,
                require_base=require_base,
                refuse_another=refuse_another,
                check=update.check,
                rate_limit=self._rate_limit,
            )
        )

    def _from_tensors(self, source: TensorSource, update: Update, take: Take) -> Batches:
        return one_batch(
            read_tensors(source, self.layouts, self._device, update.check, self._rate_limit, take)
        )

    def _from_broadcasts(self, source: DistributedSource, update: Update, take: Take) -> Batches:
        return one_batch(
            receive(source, self._groups, self.layouts, self._device, update.check, take)
        )

    def _from_gpu_memory(self, source: GPUMemorySource, update: Update, take: Take) -> Batches:
        return one_batch(self._gpu_memory.read(source, update.check, self._rate_limit))

    def _from_ipc(self, source: IPCSource, update: Update, take: Take) -> Batches:
        return with_whole_modules(
            receive_ipc(source, self._device, update.check, self._rate_limit, take, self._listings)
        )


def parts_of_all(of_each: Sequence[Mapping[str, Region]]) -> Mapping[str, Region]:
    """Return what one of several models uses of each tensor, or more."""
    if len(of_each) == 1:
        return of_each[0]
    found: dict[str, Region] = {}
    for parts in of_each:
        for name, region in parts.items():
            found[name] = region if name not in found else found[name].around(region)
    return found


def _halves_of(batch: Sequence[tuple[str, torch.Tensor]], own: Mapping[str, Region]) -> Weights:
    for name, tensor in batch:
        if tensor_of(name) in own:
            yield name, tensor


def _cut_out(
    batch: Sequence[tuple[str, torch.Tensor]],
    parts: Mapping[str, Region],
    own: Mapping[str, Region],
) -> Weights:
    for name, tensor in batch:
        if name in own:
            yield name, tensor[own[name].seen_from(parts[name]).slices()]

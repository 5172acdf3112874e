"""Writes an update into a model's live weights, by SGLang's own steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader, post_load_weights
from torch import nn

from sglang_inflight.scheduler.plans.replay import Replay
from sglang_inflight.scheduler.plans.targets import Targets
from sglang_inflight.scheduler.update.changes.encoding import bits_of
from sglang_inflight.scheduler.update.checks.dataflow import Kind, Target, Write
from sglang_inflight.scheduler.update.finished.places import Place, tensors_of
from sglang_inflight.scheduler.update.finished.recipe import describe_layout
from sglang_inflight.scheduler.update.kind_of_model import KindOfModel
from sglang_inflight.scheduler.update.shadow import refresh_derived, weights_of
from sglang_inflight.scheduler.update.swap import NumberSwap, PreparedSwap
from sglang_inflight.scheduler.update.weight import Moved, Patch, Weight
from sglang_inflight.storages import memory_key
from sglang_inflight.tensor_digest import flat_pieces
from sglang_inflight.vocabulary.answers import StagedChanges
from sglang_inflight.vocabulary.errors import Refused

Places = dict[Place, torch.Tensor]


class _Live:
    """The form of an update in place: elements go into the served weights."""

    def __init__(self, before_write: Callable[[], None]) -> None:
        self._before_write = before_write

    def hold(self, weight: Weight) -> None:
        pass

    def begin(self) -> None:
        pass

    def expect(self, weight: Weight, *, keeps: bool) -> None:
        pass

    def move(self, moved: Sequence[Moved]) -> None:
        self._before_write()
        for weight, box, of in moved:
            box.view(weight.live.data).copy_(of)

    def move_row(self, targets: Targets, row: torch.Tensor) -> None:
        self._before_write()
        targets.copy([weight.live.data for weight in targets.weights], row)

    def patch(self, patch: Patch, *, again: bool = False) -> None:
        self._before_write()
        live = patch.weight.live
        new = patch.values.to(live.device, live.dtype)
        bits_of(live).index_copy_(0, patch.at.to(live.device), bits_of(new))

    def put(self, weight: Weight, new: torch.Tensor) -> None:
        self._before_write()
        weight.live.data.copy_(new)

    def forget(self, weight: Weight, start: int, end: int) -> None:
        pass

    def fill(self, weight: Weight, memory: torch.Tensor) -> None:
        memory.copy_(weight.live.data)

    def as_committed(self, weight: Weight) -> Iterable[torch.Tensor]:
        return flat_pieces(weight.live)

    def prepare(
        self, weights: Sequence[Weight], numbers: Sequence[NumberSwap] = ()
    ) -> PreparedSwap:
        return PreparedSwap()

    def describe(self) -> StagedChanges:
        return StagedChanges(form="off")


class InPlaceModel(KindOfModel):
    """Written in place, in the mode ``off``: the loader writes the live model.

    SGLang may finish a model after loading: it changes the layout, replaces a loaded parameter, or
    computes a product of two. Such a model is restored to the loader's parameters, written, and
    finished again. SGLang's own functions do this, on the scheduler's thread, while the loop makes
    no step. In between the weights are unusable.

    Captured graphs hold addresses. With graphs, each tensor keeps its address from before the
    update: a tensor moved by finishing is copied back, and a changed shape is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        finishes: bool,
        holds_graphs: bool,
        owners: Sequence[nn.Module] = (),
        on_announce: Callable[[], None] = lambda: None,
        on_write: Callable[[], None] = lambda: None,
        on_finish: Callable[[], None] = lambda: None,
    ) -> None:
        """``finishes``: SGLang changes the model after loading it. ``owners``: models that own
        the weights shared with ``model``.

        ``on_announce`` is called before the first write of an update, while the model is as served,
        ``on_write`` before each, and ``on_finish`` once the written model is as SGLang loads it.
        """
        self.model = model
        self.finishes = finishes
        self._device = device
        self._holds_graphs = holds_graphs
        self._owners = owners
        self._on_announce = on_announce
        self._on_write = on_write
        self._on_finish = on_finish
        self.numbers: list[NumberSwap] = []
        self.form = _Live(self._before_write)
        # written, and not finished
        self.is_open = False
        # written since the update's begin
        self.was_written = False
        self._is_direct = False
        self._before: Places = {}

    @property
    def weights(self) -> Iterator[Weight]:
        """The current parameters: finishing may replace them."""
        return (Weight(name, weight) for name, weight in weights_of(self.model))

    # all ranks do the same between the same two steps
    communicates = True

    def begin(self, replay: Replay | None, *, is_partial: bool) -> None:
        self.was_written = False

    def announce(self) -> None:
        if not self.is_open:
            self._on_announce()

    def note_write(self, write: Write) -> None:
        self.open()

    def targets(self) -> dict[int, Target]:
        found = {
            memory_key(tensor): Target(Kind.DERIVED, str(place))
            for place, tensor in tensors_of(self.model).items()
        }
        found |= {memory_key(w): Target(Kind.WEIGHT, name) for name, w in weights_of(self.model)}
        for owner in self._owners:
            for name, weight in weights_of(owner):
                if memory_key(weight) in found:
                    found[memory_key(weight)] = Target(Kind.FOREIGN, name)
        return found

    def open(self) -> None:
        """Begin writes, and note the tensors' addresses if graphs hold them."""
        self.was_written = True
        if not self.is_open:
            self.is_open = True
            if self._holds_graphs:
                # detached, because ``.data`` of a parameter may be set
                self._before = {at: t.detach() for at, t in tensors_of(self.model).items()}

    def restore(self) -> None:
        if not self.finishes:
            return
        self._on_write()
        # an update that failed half way has undone it
        if not self.is_open:
            self.open()
            DefaultModelLoader.restore_weights_before_loading(self.model, self._device)

    def load(self, weights: Iterator[tuple[str, torch.Tensor]], *, from_disk: bool) -> Any:
        if from_disk:
            # SGLang renames the tensors of some formats when it reads them from disk
            return DefaultModelLoader.load_weights_only(self.model, weights, self._device)
        return super().load(weights, from_disk=False)

    def write_directly(self) -> None:
        self._is_direct = True

    def seal(self, *, was_loaded: bool) -> None:
        # a model without a new tensor is finished already, and must not be finished twice
        if not self.is_open:
            return
        self._on_write()
        self.is_open = False
        if self.finishes:
            if self._is_direct or not was_loaded:
                post_load_weights(self.model)
            DefaultModelLoader.postprocess_weights(self.model, self._device)
        self._is_direct = False
        refresh_derived(self.model)
        before, self._before = self._before, {}
        if moved := _restore_addresses(before, tensors_of(self.model)):
            raise Refused(
                f"finishing the update moved {moved[0]!r}, and captured CUDA graphs still read "
                "the old memory: restart the server, or serve this model with "
                "--disable-cuda-graph"
            )
        self._on_finish()

    def _before_write(self) -> None:
        self.announce()
        self._on_write()
        self.open()


def _restore_addresses(before: Places, now: Places) -> list[str]:
    """Bring each tensor of ``now`` to its old address; return the names of failures."""
    moved = []
    for place, old in before.items():
        new = now.get(place)
        if new is not None and new.data_ptr() == old.data_ptr():
            continue
        if new is None or describe_layout(new) != describe_layout(old):
            moved.append(str(place))
            continue
        old.copy_(new)
        new.data = old
    return moved

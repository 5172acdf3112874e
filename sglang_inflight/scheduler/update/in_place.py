"""Writes an update into a model's live weights, by SGLang's own steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader, post_load_weights
from torch import nn

from sglang_inflight.scheduler.update.checks.dataflow import Kind, Target, Write
from sglang_inflight.scheduler.update.finished.places import Place, tensors_of
from sglang_inflight.scheduler.update.shadow import refresh_derived, weights_of
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import Refused

Places = dict[Place, torch.Tensor]


class InPlaceModel:
    """Replaces ``Shadow`` in the mode ``off``: the loader writes the live model.

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
    ) -> None:
        """``finishes``: SGLang changes the model after loading it. ``owners``: models that own
        the weights shared with ``model``.
        """
        self.model = model
        self.finishes = finishes
        self._device = device
        self._holds_graphs = holds_graphs
        self._owners = owners
        # written, and not finished
        self.is_open = False
        # written since the update's begin
        self.was_written = False
        self._is_direct = False
        self._before: Places = {}

    @property
    def pairs(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """The current parameters, each paired with itself: finishing may replace them."""
        return ((name, weight, weight) for name, weight in weights_of(self.model))

    @property
    def derived_pairs(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        return []

    def begin(self) -> None:
        """Begin an update."""
        self.was_written = False

    def find_derived(self) -> None:
        """Return None: derived tensors are live already."""

    def note_write(self, write: Write) -> None:
        self.open()

    def targets(self) -> dict[int, Target]:
        """Return all memory in reach of the model's loader, by ``memory_key``."""
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
        """Undo SGLang's finishing before the first tensor, unless an update failed half way."""
        if self.finishes and not self.is_open:
            self.open()
            DefaultModelLoader.restore_weights_before_loading(self.model, self._device)

    def write_directly(self) -> None:
        """Note that tensors are copied to parameters past the model's loader."""
        self._is_direct = True

    def finish(self, *, was_loaded: bool) -> None:
        """Finish the written model. ``was_loaded`` is false if no loader wrote the model.

        Raise ``Refused`` if captured graphs would read memory of no weight.
        """
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


def _restore_addresses(before: Places, now: Places) -> list[str]:
    """Bring each tensor of ``now`` to its old address; return the names of failures."""
    moved = []
    for place, old in before.items():
        new = now.get(place)
        if new is not None and new.data_ptr() == old.data_ptr():
            continue
        if new is None or _layout_of(new) != _layout_of(old):
            moved.append(str(place))
            continue
        old.copy_(new)
        new.data = old
    return moved


def _layout_of(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype

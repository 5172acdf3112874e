"""A model that is not done when its weights are loaded: SGLang makes more of them then."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader, post_load_weights
from torch import nn

from sglang_inflight.scheduler.update.shadow import weights_of


class FinishedModel:
    """In a ``Shadow``'s place where there is none: the live model, loaded as SGLang loads it.

    What SGLang makes after loading may be another layout, another parameter in the place of
    the one that was loaded, or a product of two. So the model is ``restored`` to what a loader
    writes, written, and finished, all by SGLang's own functions, on the scheduler's thread,
    while the loop makes no step. In between its weights are of no use.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self._device = device
        # restored, and not finished
        self.is_open = False

    @property
    def pairs(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """As a shadow's, of the parameters that are there now: finishing may replace them."""
        return ((name, weight, weight) for name, weight in weights_of(self.model))

    def find_derived(self) -> None:
        """What loading changes is live already."""

    def is_anothers(self, weight: torch.Tensor) -> bool:
        """As SGLang does it, a draft's checkpoint may bring what it has from its target."""
        return False

    def restore(self) -> None:
        """Before the first tensor. After a failure half way nothing is to be undone."""
        if not self.is_open:
            self.is_open = True
            DefaultModelLoader.restore_weights_before_loading(self.model, self._device)

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """By the steps of SGLang's updates from disk, which rename for some formats."""
        DefaultModelLoader.load_weights_only(self.model, weights, self._device)

    def finish(self, *, was_loaded: bool) -> None:
        """``was_loaded`` is false where something else than its loader has written it."""
        self.is_open = False
        if not was_loaded:
            post_load_weights(self.model)
        DefaultModelLoader.postprocess_weights(self.model, self._device)

"""The shadows of all models of a rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sglang_inflight.scheduler.update.changes.recording import Budget, Recording
from sglang_inflight.scheduler.update.forms import Changes, Form, WholeCopies
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.shadow import ShadowParameters
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel
from sglang_inflight.scheduler.update.swap import Swap, swap_for
from sglang_inflight.storages import give_back_freed
from sglang_inflight.vocabulary.errors import Refused


class Shadows:
    """Built at the first update, together or not at all: no memory is left half used.

    Only the staging thread touches this object, except in ``forget``. The scheduler's thread calls
    ``forget`` while the staging thread is idle.
    """

    def __init__(
        self,
        models: Sequence[ShadowedModel],
        parameters: ShadowParameters,
        rate_limit: RateLimit,
        budget: Budget,
    ) -> None:
        self._models = models
        self._parameters = parameters
        self._rate_limit = rate_limit
        self._budget = budget
        self._swap: Swap | None = None
        self._form: Form | None = None
        self._built_as: StagingMode | None = None

    @property
    def swap(self) -> Swap:
        assert self._swap is not None
        return self._swap

    @property
    def form(self) -> Form:
        assert self._form is not None
        return self._form

    def build(self, mode: StagingMode, device: torch.device) -> None:
        """Build all shadows. Raise ``Refused`` on a failure; the next call tries again."""
        if self._built_as is mode:
            return
        if self._built_as is not None:
            self.forget(device)
        failure = self._try_to_build(mode, device)
        if failure is not None:
            # not in the except block: the exception keeps its frames' tensors alive there
            self.forget(device)
            raise Refused(f"the weights have no shadow, because building it failed: {failure}")
        self._built_as = mode

    def _try_to_build(self, mode: StagingMode, device: torch.device) -> str | None:
        try:
            if mode is not StagingMode.OFF:
                self._swap = swap_for(device)
            if mode is StagingMode.CHANGES:
                assert self._swap is not None
                recording = Recording(self._budget, self._rate_limit)
                form: Form = Changes(recording, self._swap, self._rate_limit)
            else:
                form = WholeCopies(mode, self._swap, self._rate_limit)
            owners: list[nn.Module] = []
            for model in self._models:
                model.build_shadow(mode, device, tuple(owners), form, self._rate_limit)
                owners.append(model.runner.model)
            self._form = form
        except Exception as error:
            return f"{error}".split("\n")[0] or type(error).__name__
        return None

    def forget(self, device: torch.device) -> None:
        """Free all shadows; the next update builds them anew."""
        self._swap = self._form = self._built_as = None
        for model in self._models:
            model.forget_shadow()
        self._parameters.forget()
        if device.type != "cpu":
            give_back_freed(device)

"""The form of staging of a rank, and its models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from sglang_inflight.scheduler.update.changes.recording import Budget, Recording
from sglang_inflight.scheduler.update.digested_form import DigestedForm
from sglang_inflight.scheduler.update.forms import Changes, Form, WholeCopies
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel
from sglang_inflight.scheduler.update.swap import swap_for
from sglang_inflight.storages import give_back_freed
from sglang_inflight.vocabulary.answers import StagedChanges
from sglang_inflight.vocabulary.errors import Refused

StorageFor = Callable[[torch.Tensor, torch.device], torch.Tensor]


class Shadows:
    """Built at the first update, together or not at all: no memory is left half used.

    Only the staging thread touches this object, except in ``forget``. The scheduler's thread calls
    ``forget`` while the staging thread is idle.
    """

    def __init__(
        self,
        models: Sequence[ShadowedModel],
        storage_for: StorageFor,
        rate_limit: RateLimit,
        budget: Budget,
        *,
        check_finite: bool,
    ) -> None:
        """``storage_for`` returns memory for a copy of a tensor, on a device.

        ``check_finite``: see ``ShadowedModel.build``.
        """
        self._models = models
        self._storage_for = storage_for
        self._rate_limit = rate_limit
        self._budget = budget
        self._check_finite = check_finite
        self._form: DigestedForm | None = None
        self._copies: WholeCopies | None = None
        self._built_as: StagingMode | None = None

    @property
    def form(self) -> DigestedForm:
        assert self._form is not None
        return self._form

    def build(self, mode: StagingMode, device: torch.device) -> None:
        """Build for all models. Raise ``Refused`` on a failure; the next call tries again."""
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
            form = self._make_form(mode, device)
            self._form = DigestedForm(form, self._rate_limit) if form is not None else None
            owners: list[nn.Module] = []
            for model in self._models:
                model.build(
                    device,
                    tuple(owners),
                    self._form,
                    self._rate_limit,
                    self._budget.windows,
                    check_finite=self._check_finite,
                )
                owners.append(model.runner.model)
        except Exception as error:
            return f"{error}".split("\n")[0] or type(error).__name__
        return None

    def _make_form(self, mode: StagingMode, device: torch.device) -> Form | None:
        if mode is StagingMode.OFF:
            return None
        swap = swap_for(device)
        if mode is StagingMode.CHANGES:
            return Changes(Recording(self._budget, self._rate_limit), swap, self._rate_limit)
        storage = torch.device("cpu") if mode is StagingMode.HOST else device
        self._copies = WholeCopies(
            mode, swap, self._rate_limit, lambda live: self._storage_for(live, storage)
        )
        return self._copies

    def describe(self) -> StagedChanges:
        """Return this rank's part of the receipt."""
        return self._form.describe() if self._form is not None else StagedChanges(form="off")

    def forget(self, device: torch.device) -> None:
        """Free all memory; the next update builds anew."""
        for model in self._models:
            model.forget_built()
        if self._form is not None:
            # cycles of modules and loaders may hold the form
            self._form.begin()
        if self._copies is not None:
            self._copies.free()
        self._form = self._copies = self._built_as = None
        if device.type != "cpu":
            give_back_freed(device)

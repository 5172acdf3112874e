"""A model that SGLang serves as the model's loader has left it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sglang_inflight.scheduler.update.checks.coverage import holds_stray, stray_refusal
from sglang_inflight.scheduler.update.checks.dataflow import Dataflow, Recorder, Target, Write
from sglang_inflight.scheduler.update.finished.places import Number
from sglang_inflight.scheduler.update.forms import Form
from sglang_inflight.scheduler.update.plans.replay import Replay
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.scratch import Scratch
from sglang_inflight.scheduler.update.shadow import (
    derives,
    refresh_derived,
    refuse_shared_memory,
)
from sglang_inflight.scheduler.update.swap import NumberSwap
from sglang_inflight.scheduler.update.weight import Weight
from sglang_inflight.vocabulary.errors import Refused


class Derives(Refused):
    """Loading replaces something that no commit can exchange. ``name`` says what."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class LoadedModel:
    """Loads an update's tensors past the served model, into scratch memory (``scratch.py``).

    Tensors that the loader writes besides the weights are staged at the seal, like weights.

    Owners: the staging thread, from an update's begin to its seal. After that only the scheduler's
    thread touches what was staged. The commit's message orders the two.
    """

    def __init__(
        self,
        live: nn.Module,
        foreign: Container[str],
        form: Form,
        rate_limit: RateLimit,
        budget: int,
        *,
        check_finite: bool,
    ) -> None:
        """The arguments are those of ``Scratch``. Raises ``Refused`` for weights in one memory."""
        refuse_shared_memory(live)
        self.form = form
        self._rate_limit = rate_limit
        self._check_finite = check_finite
        self._scratch = Scratch(live, foreign, form, rate_limit, budget, check_finite=check_finite)
        self._shadow = self._scratch.shadow
        self._is_restored = False
        self._derives = derives(live)
        self.derived: list[Weight] = []
        self.numbers: list[NumberSwap] = []
        for weight in self._scratch.weights:
            if weight.name not in foreign:
                form.hold(weight)

    @property
    def model(self) -> nn.Module:
        return self._shadow.model

    @property
    def weights(self) -> Iterator[Weight]:
        return self._scratch.weights

    @property
    def recorder(self) -> Recorder:
        return self._scratch

    was_written = communicates = False

    def targets(self) -> Mapping[int, Target]:
        return self._shadow.targets()

    def begin(self, replay: Replay | None, *, is_partial: bool) -> None:
        self._is_restored = False
        self.derived.clear()
        self._scratch.begin(replay, keeps=is_partial)

    def announce(self) -> None:
        pass

    def write_directly(self) -> None:
        pass

    def restore(self) -> None:
        if not self._is_restored:
            self._is_restored = True
            self._shadow.begin()

    def load(self, weights: Iterator[tuple[str, torch.Tensor]], *, from_disk: bool) -> Any:
        loader: Any = self.model
        return loader.load_weights(weights)

    def note_write(self, write: Write) -> None:
        self._shadow.note_write(write)

    def finish_complete(self) -> None:
        pass

    def end_call(self) -> None:
        self._scratch.close_all()

    @torch.no_grad()
    def seal(self, *, was_loaded: bool) -> None:
        """Recompute what is derived from weights, and stage it. Raises ``Derives``, ``Refused``."""
        if not self._is_restored and not self._derives:
            return
        self.restore()
        self._scratch.seal()
        targets = self._shadow.targets()
        with Dataflow(targets, before_write=self.note_write, recorder=self._scratch):
            refresh_derived(self.model)
        self._scratch.refuse_unseen()
        if (name := self._shadow.find_derived()) is not None:
            raise Derives(name)
        for name, live, own in self._shadow.derived:
            if self._check_finite and any(
                holds_stray(new, served) for new, served in self._rate_limit.cut(own, live)
            ):
                raise stray_refusal(name)
            weight = Weight(name, live)
            self.form.expect(weight, keeps=True)
            self.form.put(weight, own)
            self.derived.append(weight)

    def unwritten(self, name: str) -> int:
        return self._scratch.unwritten(name)

    def describe_numbers(self, *, as_staged: bool) -> str:
        return ""

    def take_saved(self, weight: Weight, new: torch.Tensor) -> None:
        self.form.put(weight, new)
        self._scratch.note_whole(weight.name)

    def take_saved_numbers(self, numbers: Mapping[str, Number]) -> None:
        if numbers:
            raise Refused("the model has no numbers made by finishing")

    def forget(self) -> None:
        self._scratch.forget()

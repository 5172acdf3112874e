"""A model that SGLang finishes after loading, updated in flight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import nn

from sglang_inflight.scheduler.plans.replay import Replay
from sglang_inflight.scheduler.update.checks.coverage import holds_stray, stray_refusal
from sglang_inflight.scheduler.update.checks.dataflow import Recorder
from sglang_inflight.scheduler.update.finished.kv_scales import is_kv_scale
from sglang_inflight.scheduler.update.finished.places import (
    Number,
    Place,
    numbers_of,
    tensors_of,
    without_views,
)
from sglang_inflight.scheduler.update.finished.raw_model import Made, RawModel
from sglang_inflight.scheduler.update.finished.recipe import Recipe, describe_layout
from sglang_inflight.scheduler.update.forms import Form
from sglang_inflight.scheduler.update.kind_of_model import KindOfModel
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.swap import NumberSwap
from sglang_inflight.scheduler.update.weight import Weight
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import Refused


class FinishedModel(RawModel, KindOfModel):
    """Stages a model that SGLang finishes after loading.

    The model's loader fills raw weights, and SGLang's own steps finish them (``raw_model.py``).
    Every tensor that this makes is staged beside the served tensor of the same place, and a commit
    exchanges the two. So the served tensors keep their addresses, for captured graphs and views.

    Owners: the staging thread, from an update's begin to its seal. After that only the scheduler's
    thread touches what was staged. The commit's message orders the two.
    """

    def __init__(
        self,
        pristine: nn.Module,
        live: nn.Module,
        recipe: Recipe,
        form: Form,
        *,
        device: torch.device,
        rate_limit: RateLimit,
        holds_graphs: bool,
        owners: Sequence[nn.Module],
        check_finite: bool,
    ) -> None:
        """``owners``: models that own the weights shared with ``live``.

        ``check_finite``: no tensor holds NaN, so no weight may get it.
        """
        super().__init__(pristine, live, device, rate_limit, recipe)
        self.form = form
        self._check_finite = check_finite
        self._holds_graphs = holds_graphs
        self._live_tensors = live_tensors_of(live, recipe, owners)
        self._within = without_views(self._live_tensors)
        self._weights: dict[Place, Weight] = {}
        for place, tensor in self._live_tensors.items():
            if self._within[place] == place:
                self._weights[place] = weight = Weight(str(place), tensor)
                form.hold(weight)
        self._by_name = {str(place): place for place in (*self._weights, *recipe.numbers)}
        self._taken: set[Place] = set()
        self._has_loaded = False
        # the served ones at the update's begin, and those that differ from them
        self._numbers: dict[Place, tuple[Any, str, Number]] = {}
        self.numbers: list[NumberSwap] = []

    @property
    def weights(self) -> Iterator[Weight]:
        return iter(self._weights.values())

    @property
    def recorder(self) -> Recorder:
        return self

    def begin(self, replay: Replay | None, *, is_partial: bool) -> None:
        self._taken.clear()
        self.numbers.clear()
        self._numbers = numbers_of(self._live)
        self._has_loaded = False
        super().begin(replay, is_partial=is_partial)

    def _served_tensors(self) -> dict[Place, torch.Tensor]:
        now = super()._served_tensors()
        for place, weight in self._weights.items():
            if now.get(place) is not weight.live:
                raise Refused(f"{weight.name!r} was replaced while it was served")
        return now

    def restore(self) -> None:
        self._has_loaded = True

    def load(self, weights: Iterator[tuple[str, torch.Tensor]], *, from_disk: bool) -> Any:
        if from_disk:
            # SGLang renames the tensors of some formats when it reads them from disk
            return DefaultModelLoader.load_weights_only(self.model, weights, self._device)
        return super().load(weights, from_disk=False)

    @torch.no_grad()
    def seal(self, *, was_loaded: bool) -> None:
        """Finish and stage the rest. Raise ``Refused`` if something is missing, or new."""
        if not (self._has_loaded or (self._replay is not None and self._replay.has_moved)):
            return
        self.finish()
        for place in sorted(self._weights.keys() - self._taken):
            if self.has_finished(place.module):
                raise Refused(f"finishing the update did not make {str(place)!r}")
        self.forget()

    def describe_numbers(self, *, as_staged: bool) -> str:
        staged = {swap.place: swap.other for swap in self.numbers} if as_staged else {}
        return describe_numbers(live_numbers(self._live, self._recipe) | staged)

    def take_saved(self, weight: Weight, new: torch.Tensor) -> None:
        self._take(Made({self._by_name[weight.name]: new}, {}))

    def take_saved_numbers(self, numbers: Mapping[str, Number]) -> None:
        if unknown := sorted(numbers.keys() - self._by_name.keys()):
            raise Refused(f"finishing makes no {unknown[0]!r} here")
        self._take(Made({}, {self._by_name[name]: number for name, number in numbers.items()}))

    def take(self, made: Made) -> None:
        """Stage what was made. Raise ``Refused`` if a commit could not exchange it."""
        if self._check_finite:
            for place, tensor in made.tensors.items():
                self._refuse_stray(place, tensor)
        self._refuse_unsent_scales(made)
        self._take(made)

    def _refuse_unsent_scales(self, made: Made) -> None:
        """Raise ``Refused`` if no KV scale came for a layer that is served with another than 1.

        An earlier update has brought that scale. SGLang takes 1 where it finds none.
        """
        for place, number in made.numbers.items():
            if not is_kv_scale(place) or any(w.names for w in self._of_module[place.module]):
                continue
            live = getattr(self._live_modules[place.module], place.attribute)
            if number != live:
                raise Refused(
                    f"the update is not complete: {str(place)!r} is {live}, and no scale of this "
                    f"layer was sent, for which SGLang takes {number}: send its k_scale and v_scale"
                )

    def _refuse_stray(self, place: Place, made: torch.Tensor) -> None:
        live = self._live_tensors.get(place)
        if live is None or describe_layout(made) != describe_layout(live):
            return
        for new, served in self._rate_limit.cut(made, live):
            if holds_stray(new, served):
                raise stray_refusal(str(place))

    def _take(self, made: Made) -> None:
        for place, tensor in made.tensors.items():
            live = self._live_tensors.get(place)
            if live is None:
                if place in self._recipe.tensors:
                    # another model of this rank owns it
                    continue
                raise Refused(f"finishing the update makes a new tensor, {str(place)!r}")
            if describe_layout(tensor) != describe_layout(live):
                raise Refused(
                    f"finishing the update makes {str(place)!r} as {describe_layout(tensor)}, and "
                    f"it is served as {describe_layout(live)}"
                )
            within = self._within[place]
            if within == place:
                self.form.put(self._weights[place], tensor)
                self._taken.add(place)
            elif _offset(tensor, made.tensors.get(within)) != _offset(
                live, self._live_tensors[within]
            ):
                raise Refused(f"finishing the update parts {str(place)!r} from {str(within)!r}")
        for place, number in made.numbers.items():
            if place not in self._numbers:
                raise Refused(f"finishing the update sets {str(place)!r}, which is not served")
            owner, attribute, now = self._numbers[place]
            if number == now:
                continue
            if not isinstance(number, bool | int | float):
                raise Refused(f"finishing the update makes {str(place)!r} no number any more")
            if self._holds_graphs:
                raise Refused(
                    f"finishing the update changes {str(place)!r} from {now} to {number}, and "
                    "captured CUDA graphs hold the old number: restart the server, or serve this "
                    "model with --disable-cuda-graph"
                )
            self.numbers.append(NumberSwap(place, owner, attribute, number))


def live_tensors_of(
    live: nn.Module, recipe: Recipe, owners: Sequence[nn.Module]
) -> dict[Place, torch.Tensor]:
    """Return the served tensors that finishing makes, except those of ``owners``."""
    foreign = memory_of(owners)
    return {
        place: tensor
        for place, tensor in tensors_of(live).items()
        if place in recipe.tensors and memory_key(tensor) not in foreign
    }


def live_numbers(live: nn.Module, recipe: Recipe) -> dict[Place, Number]:
    """Return the served numbers that finishing makes. A missing one is None."""
    numbers = {place: found[2] for place, found in numbers_of(live).items()}
    return {place: numbers.get(place) for place in recipe.numbers}


def describe_numbers(numbers: Mapping[Place, Number]) -> str:
    """Return what a digest says of ``numbers``."""
    return "".join(f"{place} {numbers[place]!r}\n" for place in sorted(numbers))


def memory_of(models: Sequence[nn.Module]) -> set[int]:
    """Return the memory of all tensors of ``models``, by ``memory_key``."""
    return {memory_key(tensor) for model in models for tensor in tensors_of(model).values()}


def _offset(view: torch.Tensor, whole: torch.Tensor | None) -> int | None:
    """Return where ``view`` begins in ``whole``, in bytes; None if it lies elsewhere."""
    if whole is None or memory_key(view) != memory_key(whole):
        return None
    return view.data_ptr() - whole.data_ptr()

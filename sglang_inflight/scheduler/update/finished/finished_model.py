"""A model that SGLang finishes after loading, updated in flight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sglang_inflight.scheduler.update.checks.dataflow import Target, Write
from sglang_inflight.scheduler.update.finished.places import (
    Number,
    Place,
    numbers_of,
    split_name,
    tensors_of,
    without_views,
)
from sglang_inflight.scheduler.update.finished.raw_model import Made, RawModel
from sglang_inflight.scheduler.update.finished.recipe import Recipe, describe_layout
from sglang_inflight.scheduler.update.forms import Form
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.shadow import ShadowParameters
from sglang_inflight.scheduler.update.swap import NumberSwap
from sglang_inflight.scheduler.update.weight import Weight
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import Refused


class FinishedModel:
    """Replaces ``Shadow`` for a model that SGLang finishes after loading.

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
        parameters: ShadowParameters,
        form: Form,
        *,
        device: torch.device,
        storage: torch.device,
        rate_limit: RateLimit,
        holds_graphs: bool,
        owners: Sequence[nn.Module],
    ) -> None:
        """``storage``: where a form with whole copies keeps them. ``owners``: models that own the
        weights shared with ``live``.
        """
        self._live = live
        self._recipe = recipe
        self._form = form
        self._holds_graphs = holds_graphs
        self._raw = RawModel(pristine, live, device, self, rate_limit, recipe)
        self._live_tensors = live_tensors_of(live, recipe, owners)
        self._within = without_views(self._live_tensors)
        self._weights: dict[Place, Weight] = {}
        for place, tensor in self._live_tensors.items():
            if self._within[place] == place:
                handle_for = form.handle_for
                staged = (
                    parameters.storage_for(tensor, storage)
                    if handle_for is None
                    else handle_for(tensor)
                )
                parameters.add(tensor, staged, is_weight=True)
                self._weights[place] = Weight(str(place), tensor, staged)
        self._by_name = {str(place): place for place in (*self._weights, *recipe.numbers)}
        self._taken: set[Place] = set()
        # the served ones at the update's begin, and those that differ from them
        self._numbers: dict[Place, tuple[Any, str, Number]] = {}
        self.numbers: list[NumberSwap] = []

    @property
    def model(self) -> nn.Module:
        return self._raw.model

    @property
    def pairs(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, served tensor and staged tensor of each tensor that a commit exchanges."""
        return list(self._weights.values())

    @property
    def derived_pairs(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        return []

    def begin(self, *, is_partial: bool, planned: Iterable[str] = ()) -> None:
        """Begin an update. Raise ``Refused`` if a served tensor was replaced since the last.

        ``planned``: weights whose modules are staged past the loader.
        """
        now = tensors_of(self._live)
        for place, weight in self._weights.items():
            if now.get(place) is not weight.live:
                raise Refused(f"{weight.name!r} was replaced while it was served")
        self._taken.clear()
        self.numbers.clear()
        self._numbers = numbers_of(self._live)
        self._raw.begin(
            now, is_partial=is_partial, planned={split_name(name)[0] for name in planned}
        )

    def targets(self) -> dict[int, Target]:
        """Return all memory in reach of the model's loader, by ``memory_key``."""
        return self._raw.targets()

    def siblings(self, names: Iterable[str]) -> dict[int, tuple[str, ...]]:
        """Return, by memory that the loader writes, the weights of its module among ``names``."""
        return self._raw.siblings(names)

    def leave(self, came: Mapping[str, Iterable[str]]) -> None:
        """Leave planned weights to the loader. ``came``: what was staged of each, by its name."""
        self._raw.leave(came)

    def note_write(self, write: Write) -> None:
        self._raw.note_write(write)

    def finish_complete(self) -> None:
        """Finish and stage the modules whose tensors have all come."""
        self._raw.finish_complete()

    def finish(self) -> None:
        """Finish and stage the rest. Raise ``Refused`` if something is missing, or new."""
        self._raw.finish()
        for place in sorted(self._weights.keys() - self._taken):
            if self._raw.has_finished(place.module):
                raise Refused(f"finishing the update did not make {str(place)!r}")
        self.forget()

    def forget(self) -> None:
        """Give back the memory of tensors that an update brought, and that are not staged."""
        self._raw.forget()

    def describe_numbers(self, *, as_staged: bool) -> str:
        """Return the numbers that finishing makes, for a digest: as served, or as staged."""
        staged = {swap.place: swap.other for swap in self.numbers} if as_staged else {}
        return describe_numbers(live_numbers(self._live, self._recipe) | staged)

    def find_derived(self) -> str | None:
        return None

    def take_saved(
        self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Number]
    ) -> None:
        """Stage what another server's finishing has made, by place. Raises as ``take`` does."""
        places = self._by_name
        if unknown := sorted((tensors.keys() | numbers.keys()) - places.keys()):
            raise Refused(f"finishing makes no {unknown[0]!r} here")
        self.take(
            Made(
                {places[name]: tensor for name, tensor in tensors.items()},
                {places[name]: number for name, number in numbers.items()},
            )
        )

    def take(self, made: Made) -> None:
        """Stage what was made. Raise ``Refused`` if a commit could not exchange it."""
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
                self._form.put(self._weights[place], tensor)
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

"""The ways in which SGLang serves a model decide how an update loads it: one class for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from sglang_inflight.scheduler.plans.replay import Replay
from sglang_inflight.scheduler.update.checks.dataflow import Recorder, Target, Write
from sglang_inflight.scheduler.update.finished.places import Number
from sglang_inflight.scheduler.update.forms import Form
from sglang_inflight.scheduler.update.swap import NumberSwap
from sglang_inflight.scheduler.update.weight import Weight
from sglang_inflight.vocabulary.errors import Refused


class KindOfModel(Protocol):
    """A model into which an update's tensors are loaded. Used on the staging thread.

    ``LoadedModel``, ``FinishedModel`` and ``InPlaceModel`` are the kinds.
    """

    # how elements are staged, or written
    form: Form
    # the model whose loader gets tensors
    model: nn.Module
    # numbers of the served model that the open update changes
    numbers: list[NumberSwap]
    # tensors besides the weights that the sealed update exchanges
    derived: Sequence[Weight] = ()
    # whether operations of loading may wait for other ranks
    communicates: bool = False
    # whether the open update has written the served model
    was_written: bool = False

    @property
    def recorder(self) -> Recorder | None:
        """Takes part in the loader's operations, if not None."""
        return None

    @property
    def weights(self) -> Iterator[Weight]:
        """All weights that a commit may exchange, also those that another model owns."""

    def targets(self) -> Mapping[int, Target]:
        """Return all memory in reach of the model's loader, by ``memory_key``."""

    def begin(self, replay: Replay | None, *, is_partial: bool) -> None:
        """Begin an update. ``replay``: of the model's plan, if there is one.

        ``is_partial``: elements that are not sent keep their values. Raises ``Refused`` if updates
        cannot be staged any more.
        """

    def announce(self) -> None:
        """Prepare for a call of the update, before its first tensor."""
        return

    def restore(self) -> None:
        """Prepare for a tensor that the loader gets. Called in each call of the update."""
        return

    def load(self, weights: Iterator[tuple[str, torch.Tensor]], *, from_disk: bool) -> Any:
        """Let the model's loader take ``weights``."""
        loader: Any = self.model
        return loader.load_weights(weights)

    def write_directly(self) -> None:
        """Note that tensors are copied to parameters past the model's loader."""
        return

    def note_write(self, write: Write) -> None:
        """Note a loader's write, before it happens."""

    def finish_complete(self) -> None:
        """Finish what is complete. Called between two of the loader's tensors."""
        return

    def end_call(self) -> None:
        """Note that the loader's call has ended."""
        return

    def seal(self, *, was_loaded: bool) -> None:
        """Make and stage what the update makes of its tensors. Raises ``Refused``.

        ``was_loaded`` is false if no tensor came, and something else wrote the served model.
        """

    def unwritten(self, name: str) -> int:
        """Return how many elements of a weight without a plan no tensor has brought.

        0 also where other checks refuse what is not whole.
        """
        return 0

    def describe_numbers(self, *, as_staged: bool) -> str:
        """Return the numbers that finishing makes, for a digest: as served, or as staged."""
        return ""

    def take_saved(self, weight: Weight, new: torch.Tensor) -> None:
        """Stage ``new`` for all of ``weight``, as another server serves it. Raises ``Refused``."""
        self.form.put(weight, new)

    def take_saved_numbers(self, numbers: Mapping[str, Number]) -> None:
        """Stage numbers as another server serves them, by place. Raises ``Refused``."""
        if numbers:
            raise Refused("the model has no numbers made by finishing")

    def forget(self) -> None:
        """Give back the memory of what is loaded, and not staged."""
        return

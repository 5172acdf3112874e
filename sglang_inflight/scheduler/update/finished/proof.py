"""Finds a model's recipe with the checkpoint that it serves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import nn

from sglang_inflight.scheduler.update.checks.dataflow import Dataflow
from sglang_inflight.scheduler.update.finished.places import Place, split_name, tensors_of
from sglang_inflight.scheduler.update.finished.raw_model import Made, RawModel
from sglang_inflight.scheduler.update.finished.recipe import Comparison, Recipe
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.vocabulary.errors import Dropped, Refused, Unproven, describe


class NotNow(Unproven):
    """The proof could not be made, for a reason that may pass: no room, or nothing to read."""


def find_recipe(
    pristine: nn.Module,
    live: nn.Module,
    device: torch.device,
    weights: Iterable[tuple[str, torch.Tensor]],
    rate_limit: RateLimit,
    host_bytes: int,
    loaded: Collection[int],
    check: Callable[[], None] = lambda: None,
) -> Recipe:
    """Load ``weights``, which are served, beside the served model, finish it, and compare the two.

    ``pristine`` is the model before loading, ``live`` the served one. The load takes host memory
    for all weights of this rank and for finishing one module, at most ``host_bytes``. ``loaded``:
    memory of ``live`` that loading made, by ``memory_key``. ``check`` raises to give up.

    Raise ``Unproven`` with the first difference, or if the weights cannot be loaded here; its child
    ``NotNow`` if the reason may pass.
    """
    proof = _Proof(live, rate_limit, check)
    raw = proof.raw = RawModel(pristine, live, device, proof, rate_limit, None)
    needed = raw.nbytes + raw.most_nbytes_finished
    if needed > host_bytes:
        raise NotNow(
            f"its first update loads the served checkpoint beside it, for which the host needs "
            f"{needed >> 20} MiB, and {host_bytes >> 20} MiB are free for this rank"
        )
    try:
        with torch.no_grad():
            raw.begin(tensors_of(live), is_partial=False)
            dataflow = Dataflow(raw.targets(), before_write=raw.note_write, rate_limit=rate_limit)
            with dataflow:
                received = dataflow.receive_each(weights)
                DefaultModelLoader.load_weights_only(raw.model, received, device)
            raw.finish()
        return proof.recipe(loaded)
    except (Dropped, Unproven):
        raise
    except Exception as error:
        why = str(error) if isinstance(error, Refused) else describe(error)
        kind = NotNow if _may_pass(error) else Unproven
        raise kind(
            f"the served checkpoint cannot be loaded and finished beside it: {why}"
        ) from error
    finally:
        # a cycle keeps the objects until the next collection
        raw.forget()
        if device.type != "cpu":
            # SGLang brings results back to pinned memory, which torch would keep
            torch.accelerator.empty_host_cache()


def _may_pass(error: BaseException | None) -> bool:
    """Return whether ``error`` comes of memory that is taken now, or of files out of reach."""
    while error is not None:
        if isinstance(error, OSError | MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
            return True
        error = error.__cause__
    return False


# texts of errors of torch's allocator on the host, and of CUDA's
_NO_MEMORY = ("can't allocate memory", "out of memory")


class _Proof:
    """Compares with the served model in place of staging."""

    raw: RawModel

    def __init__(self, live: nn.Module, rate_limit: RateLimit, check: Callable[[], None]) -> None:
        self._comparison = Comparison(live, rate_limit, check)
        self._present: set[Place] = set()
        self._kept: set[str] = set()

    def take(self, made: Made) -> None:
        self._comparison.compare(made.tensors, made.numbers)
        self._present |= made.present
        self._kept |= made.kept

    def recipe(self, loaded: Collection[int]) -> Recipe:
        """Return the findings, after the last ``take``. Raise ``Unproven`` if some are missing."""
        self._comparison.end(self._present, self.raw.reached(), loaded)
        names, tensors = self.raw.names(), self._comparison.tensors
        # finishing has deleted the others: they are no module's result, and wait for the rest
        there = {name for name in names if Place(*split_name(name)) in tensors}
        gone = {split_name(name)[0] for name in names.keys() - there}
        return Recipe(
            names=names,
            kept=frozenset(self._kept & there),
            untouched=frozenset(
                name for name in self._kept & there if split_name(name)[0] not in self.raw.looked_at
            ),
            tensors=frozenset(tensors),
            numbers=frozenset(self._comparison.numbers),
            awaited=frozenset(gone | self.raw.read_modules),
        )

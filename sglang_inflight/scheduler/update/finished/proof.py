"""Finds a model's recipe with the checkpoint that it serves."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import nn

from sglang_inflight.scheduler.update.checks.dataflow import Dataflow
from sglang_inflight.scheduler.update.finished.places import Place, split_name, tensors_of
from sglang_inflight.scheduler.update.finished.raw_model import Made, RawModel
from sglang_inflight.scheduler.update.finished.recipe import Recipe, compare
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.vocabulary.errors import Dropped, Refused, Unproven, describe


def find_recipe(
    pristine: nn.Module,
    live: nn.Module,
    device: torch.device,
    weights: Iterable[tuple[str, torch.Tensor]],
    rate_limit: RateLimit,
    host_bytes: int,
    loaded: Collection[int],
) -> Recipe:
    """Load ``weights``, which are served, beside the served model, finish it, and compare the two.

    ``pristine`` is the model before loading, ``live`` the served one. The load takes host memory
    for all weights of this rank, at most ``host_bytes``. ``loaded``: memory of ``live`` that
    loading made, by ``memory_key``.

    Raise ``Unproven`` with the first difference, or if the weights cannot be loaded here.
    """
    proof = _Proof(live, rate_limit, loaded)
    raw = proof.raw = RawModel(pristine, live, device, proof, rate_limit, None)
    if raw.nbytes > host_bytes:
        raise Unproven(
            f"its first update loads the served checkpoint beside it, for which the host needs "
            f"{raw.nbytes >> 20} MiB, and {host_bytes >> 20} MiB are free for this rank"
        )
    try:
        with torch.no_grad():
            raw.begin(tensors_of(live), is_partial=False)
            dataflow = Dataflow(raw.targets(), before_write=raw.note_write, rate_limit=rate_limit)
            with dataflow:
                received = dataflow.receive_each(weights)
                DefaultModelLoader.load_weights_only(raw.model, received, device)
            raw.finish()
    except (Dropped, Unproven):
        raise
    except Exception as error:
        why = str(error) if isinstance(error, Refused) else describe(error)
        raise Unproven(
            f"the served checkpoint cannot be loaded and finished beside it: {why}"
        ) from error
    finally:
        # a cycle keeps the objects until the next collection
        raw.forget()
    assert proof.recipe is not None
    return proof.recipe


class _Proof:
    """Compares with the served model in place of staging."""

    raw: RawModel

    def __init__(self, live: nn.Module, rate_limit: RateLimit, loaded: Collection[int]) -> None:
        self._live = live
        self._loaded = loaded
        self._rate_limit = rate_limit
        self.recipe: Recipe | None = None

    def take(self, made: Made) -> None:
        compare(
            made.tensors,
            made.numbers,
            self.raw.model,
            self._live,
            self._loaded,
            self.raw.reached(),
            self._rate_limit,
        )
        names = self.raw.names()
        # finishing has deleted the others: they are no module's result, and wait for the rest
        there = {name for name in names if Place(*split_name(name)) in made.tensors}
        gone = {split_name(name)[0] for name in names.keys() - there}
        self.recipe = Recipe(
            names=names,
            kept=self.raw.kept() & there,
            tensors=frozenset[Place](made.tensors),
            numbers=frozenset[Place](made.numbers),
            awaited=frozenset(gone | self.raw.read),
        )

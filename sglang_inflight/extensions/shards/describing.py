"""Describes the part of each tensor that a rank uses."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from sglang_inflight.scheduler.update.rate import paced
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel
from sglang_inflight.scheduler.update.sources.reading import parts_of_all
from sglang_inflight.vocabulary.shards import Held, Shards, write_shards


class Describing:
    """The last description of some models. The staging thread owns it.

    A description of a hundred thousand tensors takes a second. It is kept until a search or an
    audit changes a plan.
    """

    def __init__(self) -> None:
        self._described: Shards | None = None
        # what it was made of: held, so that another one is no mistake
        self._made_of: list[object] = []

    def of(self, models: Sequence[ShadowedModel]) -> Shards:
        """Return what one of ``models`` uses. Raises what ``ShadowedModel.parts`` raises."""
        made_of = [model.parts for model in models]
        is_kept = len(made_of) == len(self._made_of)
        if (
            self._described is None
            or not is_kept
            or not all(map(operator.is_, made_of, self._made_of))
        ):
            self._described = write_shards(paced(_held(models)))
            self._made_of = [*made_of]
        return self._described


def _held(models: Sequence[ShadowedModel]) -> Iterator[tuple[str, Held]]:
    parts = parts_of_all([model.parts for model in models])
    kinds = {name: kind for model in models for name, kind in model.findings.kinds.items()}
    for name, kind in kinds.items():
        if (region := parts.get(name)) is not None:
            dtype = str(kind.dtype).removeprefix("torch.")
            yield name, Held(dtype, kind.shape, (region,))

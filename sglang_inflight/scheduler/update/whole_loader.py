"""The type of what loads all weights of a rank as another server serves them, past its loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_inflight.messages import SavedVersion, ServedSource
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel
from sglang_inflight.scheduler.update.weight import Weight


@dataclass(frozen=True)
class Loaded:
    """The loaded weights. ``digest`` must be the rank's after the commit."""

    saved: SavedVersion
    digest: str
    tensors: int
    bytes: int


class WholeLoader(Protocol):
    """Stages the tensors of ``source``, or writes them in place. Raises ``Refused``.

    ``weights``: all of ``models``, in the digest's order. ``layout``: this rank's.
    ``check_finite`` refuses NaN and infinity. ``count`` gets each tensor.
    """

    def __call__(
        self,
        source: ServedSource,
        models: Sequence[ShadowedModel],
        weights: Iterable[tuple[ShadowedModel, Weight]],
        layout: Mapping[str, str],
        *,
        in_place: bool,
        check_finite: bool,
        count: Callable[[torch.Tensor], None],
        check: Callable[[], None],
        rate_limit: RateLimit,
    ) -> Loaded: ...

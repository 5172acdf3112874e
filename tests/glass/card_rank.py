"""A rank on the card: a model, the streams of a scheduler and of staging, and real updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from harness.glass.platform import exchange_by_card
from sglang_inflight.scheduler.update.changes.recording import Budget
from sglang_inflight.scheduler.update.live_machine import ReadDigest
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.vocabulary.labels import VersionLabel
from tests.support.rank import Rank

glass: Any = torch.get_device_module("glass")
GLASS = torch.device("glass", 0)
ROWS, COLUMNS = 64, 32
# changes beyond these bytes of the device go to pinned memory
UNLIMITED, ON_HOST = Budget(), Budget(device=0)


class Model(nn.Module):
    """Two weights; ``upper`` is the first half of ``weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS), requires_grad=False)
        self.other = nn.Parameter(torch.zeros(ROWS, COLUMNS), requires_grad=False)

    def forward(self) -> torch.Tensor:
        return self.weight + self.other

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters: dict[str, Any] = dict(self.named_parameters())
        for name, tensor in weights:
            if name == "upper":
                parameters["weight"].data[: ROWS // 2].copy_(tensor)
            else:
                default_weight_loader(parameters[name], tensor)


class CardRank:
    """A model on the card, with the streams of a scheduler and of staging."""

    def __init__(
        self,
        model: nn.Module,
        mode: StagingMode = StagingMode.CHANGES,
        budget: Budget = UNLIMITED,
        *,
        overlaps: bool = True,
    ) -> None:
        """``overlaps``: forwards run on a stream of their own, as with overlap scheduling."""
        exchange_by_card()
        self.model: Any = model
        self.forward_stream, self.staging_stream = glass.Stream(), glass.Stream()
        scheduler: Any = SimpleNamespace(
            device="glass", device_module=glass, forward_stream=self.forward_stream
        )
        self.live = LiveWeights(scheduler)
        self.live.move(ReadDigest("start"))
        self._overlaps = overlaps
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        self.rank = Rank(mode, model, checkpoint_shapes=shapes, device=GLASS, budget=budget)

    def stage(self, *calls: Mapping[str, torch.Tensor], partial: bool = False) -> Any:
        """Stage and seal an update like the staging thread, whose jobs end with a wait."""
        update = self.rank.begin(partial=partial)
        launched = self.live.launched()
        with torch.no_grad(), glass.stream(self.staging_stream):
            self.rank.send(update, [dict(call) for call in calls], after=launched)
            self.staging_stream.synchronize()
        return update.sealed

    def commit(self, sealed: Any) -> None:
        self.live.swap_in(sealed.digest, sealed.swap, base=VersionLabel(0, "v0"))

    def run(self) -> torch.Tensor:
        """Launch a forward like ``Scheduler.run_batch``, and return its result."""
        stream = glass.current_stream()
        if self._overlaps:
            self.forward_stream.wait_stream(stream)
            stream = self.forward_stream
        with torch.no_grad(), glass.stream(stream):
            result: torch.Tensor = self.model()
        return result


def on_device(model: nn.Module) -> nn.Module:
    return model.to(GLASS)


def version(number: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(number)
    return {"weight": torch.randn(ROWS, COLUMNS), "other": torch.randn(ROWS, COLUMNS)}

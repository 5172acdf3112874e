"""A method of quantization that finishes its layer as a test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from torch import nn

Finish = Callable[[Any], None]


class Finishing(QuantizeMethodBase):
    def __init__(self, finish: Finish) -> None:
        self._finish = finish

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self._finish(layer)

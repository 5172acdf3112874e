"""The marker as a model post-processed by SGLang after loading (``tests/finishing``)."""

from __future__ import annotations

from pathlib import Path

import torch

from harness import marker
from tests.support.plugins import with_plugin

CONFIG = {**marker.CONFIG, "architectures": ["FinishingForCausalLM"]}
ENV = with_plugin("finishing")


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Return the whole checkpoint of ``version``, under Hugging Face's names."""
    return marker.tensors(version)


def build(folder: Path, version: int) -> Path:
    return marker.write(folder, tensors(version), CONFIG)

"""The marker as a model post-processed by SGLang after loading (``tests/post_processing``)."""

from __future__ import annotations

from pathlib import Path

import torch

from harness import marker
from tests.support.plugins import with_plugin

CONFIG = {**marker.CONFIG, "architectures": ["PostProcessedForCausalLM"]}
ENV = with_plugin("post_processing")


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Return the whole checkpoint of ``version``, under Hugging Face's names."""
    return marker.tensors(version)


def build(folder: Path, version: int) -> Path:
    return marker.write(folder, tensors(version), CONFIG)

"""The type of every source of tensors."""

from __future__ import annotations

from collections.abc import Generator

import torch

# Names and tensors, on the staging thread. A tensor may be the caller's memory.
Weights = Generator[tuple[str, torch.Tensor], None, None]

"""The tensors and numbers of a rank that its digest covers, in the digest's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sglang_inflight.scheduler.update.finished.finished_model import describe_numbers
from sglang_inflight.scheduler.update.finished.places import Number
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel


@dataclass(frozen=True)
class LiveNumbers:
    """The numbers that finishing makes in the served models, at one moment."""

    # numbers by the model's role and the place, written as Python writes them
    written: dict[str, str]
    # the digest's last lines, one text for each finished model
    described: tuple[str, ...]


def live_tensors(models: Sequence[ShadowedModel]) -> list[tuple[str, torch.Tensor]]:
    """Return each tensor by the role of its model and its own name, once.

    A commit may replace the memory of these objects, and never the objects. Raises ``Refused`` if
    a model's tensors are not known.
    """
    found: list[tuple[str, torch.Tensor]] = []
    seen: set[int] = set()
    owners: list[nn.Module] = []
    for model in models:
        for name, tensor in model.live_tensors(owners):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found.append((f"{model.role}.{name}", tensor))
        owners.append(model.runner.model)
    return found


def read_numbers(models: Sequence[ShadowedModel]) -> LiveNumbers:
    written: dict[str, str] = {}
    described: list[str] = []
    for model in models:
        numbers = model.live_numbers()
        if numbers is not None:
            written |= {f"{model.role}.{place}": repr(value) for place, value in numbers.items()}
            described.append(describe_numbers(numbers))
    return LiveNumbers(written, tuple(described))


_WORDS: dict[str, Number] = {"True": True, "False": False, "None": None}


def parse_number(text: str) -> Number:
    """Return the number that ``repr`` wrote as ``text``. Raises ``ValueError`` for another text."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return int(text)
    except ValueError:
        return float(text)

"""Weights that stand in for a model's, their changes, and a checksum of their bytes.

Nothing here needs SGLang. The changes are found and kept by the project's own encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_inflight.scheduler.update.changes.encoding import PIECE, Part, bits_of, find_changes

SEED = 0

Changed = list[tuple[torch.Tensor, list[Part]]]
"""Each changed weight with its parts, as ``Exchange`` takes them."""


class Sizes(NamedTuple):
    """The sizes of a dense decoder. ``qkv``, ``attention``: widths of what attention projects."""

    layers: int
    hidden: int
    intermediate: int
    qkv: int
    attention: int
    vocabulary: int
    is_tied: bool

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of each weight, in the order of the model."""
        ends = [(self.vocabulary, self.hidden)] * (1 if self.is_tied else 2)
        layer: list[tuple[int, ...]] = [
            (self.hidden,),
            (self.qkv, self.hidden),
            (self.hidden, self.attention),
            (self.hidden,),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]
        return [*ends, *layer * self.layers]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all weights, in bfloat16."""
        return sum(2 * torch.Size(shape).numel() for shape in self.shapes)


def models(*, small: bool) -> dict[str, Sizes]:
    """Return the sizes of a model of about 1 GB and of one of about 16 GB, by their names.

    ``small``: of a few MB each. The names stay.
    """
    if small:
        return {
            "smaller model": Sizes(1, 64, 192, 256, 128, 17_000, True),
            "larger model": Sizes(2, 128, 384, 512, 256, 9_000, False),
        }
    return {
        "smaller model": Sizes(28, 1024, 3072, 4096, 2048, 151_936, True),
        "larger model": Sizes(36, 4096, 12_288, 6144, 4096, 151_936, False),
    }


def make(sizes: Sizes, device: torch.device) -> list[torch.Tensor]:
    """Return random bfloat16 weights on ``device``, the same ones at each call."""
    draw = torch.Generator(device).manual_seed(SEED)
    weights = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in sizes.shapes]
    for weight in weights:
        bits_of(weight).random_(generator=draw)
    return weights


class Checksum:
    """A sum over bytes and their places. It needs no memory beside one piece's."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.int64, device=device)
        # odd factors: a difference in a single element always shows
        self._factors = torch.arange(1, 2 * PIECE, 2, dtype=torch.int64, device=device)

    def add(self, piece: torch.Tensor) -> None:
        """Add ``piece``, a row of at most ``PIECE`` integers."""
        # int64 wraps around
        found = (piece.to(torch.int64) * self._factors[: len(piece)]).sum()
        self._sum.mul_(1_000_003).add_(found)

    def value(self) -> int:
        """Return the sum so far, after a wait for the device."""
        return int(self._sum)


def checksum(weights: Sequence[torch.Tensor]) -> int:
    """Return the checksum of ``weights``, which have no holes."""
    whole = Checksum(weights[0].device)
    for weight in weights:
        for piece in bits_of(weight).split(PIECE):
            whole.add(piece)
    return whole.value()


def stage(
    weights: Sequence[torch.Tensor], share: float, *, on_host: bool = False
) -> tuple[Changed, int]:
    """Return changes of about ``share`` of the elements, and the checksum of what they make.

    A changed element has another lowest bit. The weights stay as they are. ``on_host``: the changes
    are kept in pinned memory of the host.
    """
    device = weights[0].device
    draw = torch.Generator(device).manual_seed(SEED)
    whole = Checksum(device)
    changed: Changed = []
    for weight in weights:
        parts: list[Part] = []
        start = 0
        for live in bits_of(weight).split(PIECE):
            chosen = torch.rand(len(live), generator=draw, device=device) < share
            new = live ^ chosen.to(live.dtype)
            whole.add(new)
            part = find_changes(start, live, new)
            if part is not None:
                if on_host:
                    part.move_to_host()
                parts.append(part)
            start += len(live)
        if parts:
            changed.append((weight, parts))
    return changed, whole.value()

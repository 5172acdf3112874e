"""Moves of many tensors are compared with served weights at once."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from sglang_inflight.scheduler.plans.compare import compare
from sglang_inflight.scheduler.plans.moves import Box
from sglang_inflight.scheduler.plans.targets import Targets
from sglang_inflight.scheduler.update.changes.encoding import PIECE, Part, bits_of, put_into
from sglang_inflight.scheduler.update.weight import Weight

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


class Copy(NamedTuple):
    weight: Weight
    to: torch.Tensor
    of: torch.Tensor


def copy_into(weights: Tensors, name: str, to: torch.Tensor, of: torch.Tensor) -> Copy:
    return Copy(Weight(name, weights[name]), to, of)


def found_in(copies: list[Copy]) -> list[tuple[Weight, Part]]:
    boxes = []
    for weight, to, _ in copies:
        start = to.storage_offset() - weight.live.storage_offset()
        boxes.append((weight, Box(int(start), tuple(to.shape), tuple(to.stride()))))
    return [*compare(Targets(boxes), [copy.of.reshape(-1) for copy in copies], CPU)]


def apply(copies: list[Copy], weights: Tensors) -> Tensors:
    """Return the weights after the exchange of what ``compare`` finds."""
    changed = {name: weight.clone() for name, weight in weights.items()}
    seen = {name: torch.zeros(weight.numel(), dtype=torch.int8) for name, weight in weights.items()}
    for weight, part in found_in(copies):
        put_into(part, bits_of(changed[weight.name]))
        seen[weight.name][part.start + part.positions()] += 1
    assert all(int(count.max()) <= 1 for count in seen.values())
    return changed


def moved(copies: list[Copy], weights: Tensors) -> Tensors:
    expected = {name: weight.clone() for name, weight in weights.items()}
    for weight, to, of in copies:
        where = to.shape, to.stride(), to.storage_offset() - weight.live.storage_offset()
        expected[weight.name].view(-1).as_strided(*where).copy_(of)
    return expected


def weights_of(*shapes: tuple[int, ...], dtype: torch.dtype) -> Tensors:
    random = torch.Generator().manual_seed(0)
    # in one memory, as experts may be
    numels = [torch.Size(shape).numel() for shape in shapes]
    row = torch.randn(sum(numels) + 5, generator=random).to(dtype)[5:]
    parts = torch.split(row, numels)
    return {
        f"w{at}": part.view(shape)
        for at, (part, shape) in enumerate(zip(parts, shapes, strict=True))
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_exchange_of_what_is_found_gives_what_the_copies_give(
    dtype: torch.dtype, share: float
) -> None:
    weights = weights_of((6, 10), (7,), (3, 4, 5), (64, 64), dtype=dtype)
    random = torch.Generator().manual_seed(1)
    targets = [
        ("w0", weights["w0"][:, :4]),
        ("w0", weights["w0"][:, 4:]),
        ("w1", weights["w1"]),
        ("w2", weights["w2"][1]),
        ("w2", weights["w2"][2].t()),
        ("w3", weights["w3"].view(-1)),
    ]
    copies = []
    for place, to in targets:
        new = to.clone().float()
        is_changed = torch.rand(to.shape, generator=random) < share
        new[is_changed] += 1
        copies.append(copy_into(weights, place, to, new.to(dtype)))
    found, expected = apply(copies, weights), moved(copies, weights)
    for name in weights:
        assert torch.equal(bits_of(found[name]), bits_of(expected[name])), name
    if not share:
        assert not found_in(copies)


@pytest.mark.parametrize("step", [1, 1000])
def test_changes_in_a_large_weight_come_in_pieces(step: int) -> None:
    weights = weights_of((2 * PIECE + 77,), (9,), dtype=torch.bfloat16)
    new = weights["w0"].clone()
    new[::step] += 1
    copies = [
        copy_into(weights, "w1", weights["w1"], -weights["w1"]),
        copy_into(weights, "w0", weights["w0"], new),
    ]
    parts = found_in(copies)
    assert all(part.length <= PIECE for _, part in parts)
    assert sum(part.changed for _, part in parts) == len(new[::step]) + 9
    found = apply(copies, weights)
    assert torch.equal(found["w0"], new)
    assert torch.equal(found["w1"], -weights["w1"])


def test_bits_count_and_not_values() -> None:
    weights = {"w": torch.tensor([0.0, torch.nan, 1.0])}
    copies = [copy_into(weights, "w", weights["w"], torch.tensor([-0.0, torch.nan, 1.0]))]
    ((_, part),) = found_in(copies)
    assert part.changed == 1

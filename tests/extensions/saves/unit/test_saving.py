"""A piece of served weights is never copied from two versions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_inflight.extensions.saves.copying import PieceCopier, cut
from sglang_inflight.extensions.saves.tensors import parse_number
from sglang_inflight.scheduler.update.layout import name_layout
from sglang_inflight.scheduler.update.live_machine import Empty, Previous, ReadDigest
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.sources.safetensors_file import write_head
from sglang_inflight.scheduler.update.swap import PreparedSwap, swap_for
from sglang_inflight.tensor_digest import CHUNK_BYTES
from sglang_inflight.vocabulary.errors import Conflict, Refused
from sglang_inflight.vocabulary.labels import VersionLabel

CPU = torch.device("cpu")
BASE = VersionLabel(0, "v0")


def never() -> None:
    """Give nothing up."""


@pytest.fixture
def live() -> LiveWeights:
    scheduler: Any = SimpleNamespace(device="cpu")
    return LiveWeights(scheduler)


@pytest.fixture
def copier(live: LiveWeights) -> PieceCopier:
    return PieceCopier(live, threading.Lock(), CPU)


def swap_of(weight: torch.Tensor, value: float) -> PreparedSwap:
    swap = swap_for(CPU)
    return PreparedSwap(swap, ((weight, torch.full_like(weight, value)),))


def commit_before(live: LiveWeights, weight: torch.Tensor) -> Previous:
    """Make a version of sevens the previous one of ``weight``, whose number stays 0."""
    live.swap_in("sevens", swap_of(weight, 7.0), base=BASE)
    live.swap_back(base=BASE)
    assert live.reachable is not None
    return live.reachable


def copied(
    copier: PieceCopier,
    weight: torch.Tensor,
    read: Callable[[int], torch.Tensor | None],
) -> torch.Tensor:
    """Return the whole of ``weight``, saved as the version of number 0.

    ``read`` is called within each copy, with the copy's number. It returns what the copy reads in
    place of ``weight``, or None.
    """
    calls = 0

    class Watched(torch.Tensor):
        def detach(self) -> torch.Tensor:
            nonlocal calls
            calls += 1
            found = read(calls)
            return weight.detach() if found is None else found

    watched = torch.Tensor._make_subclass(Watched, weight.data)
    pieces = copier.pieces_of(watched, 0, never, UNPACED)
    return torch.cat([piece.clone() for piece in pieces]).view(weight.shape)


def test_version_that_is_served_for_one_step_is_not_saved(
    live: LiveWeights, copier: PieceCopier
) -> None:
    """Requests pinned to the previous version exchange the weights, and then exchange them back."""
    weight = nn.Parameter(torch.ones(3), requires_grad=False)
    previous = commit_before(live, weight)

    def read_in_a_turn(call: int) -> torch.Tensor | None:
        if call > 1:
            return None
        with live.previous_in_place(previous):
            return weight.detach().clone()

    assert torch.equal(copied(copier, weight, read_in_a_turn), torch.ones(3))


def test_copy_waits_until_the_version_is_back(live: LiveWeights, copier: PieceCopier) -> None:
    weight = nn.Parameter(torch.ones(3), requires_grad=False)
    previous = commit_before(live, weight)
    turn = live.previous_in_place(previous)
    turn.__enter__()
    looks: list[None] = []

    def look() -> None:
        looks.append(None)
        if len(looks) == 3:
            turn.__exit__(None, None, None)

    pieces = list(copier.pieces_of(weight, 0, look, UNPACED))
    assert torch.equal(torch.cat(pieces), torch.ones(3))
    assert len(looks) > 3


def test_commit_within_a_copy_ends_the_save(live: LiveWeights, copier: PieceCopier) -> None:
    weight = nn.Parameter(torch.ones(3), requires_grad=False)

    def commit(call: int) -> None:
        live.swap_in("d", swap_of(weight, 7.0), base=BASE)

    with pytest.raises(Conflict, match="moved on"):
        copied(copier, weight, commit)


def test_commit_and_rollback_within_a_copy_leave_one_version(
    live: LiveWeights, copier: PieceCopier
) -> None:
    """The number of the version is the same afterwards."""
    weight = nn.Parameter(torch.ones(3), requires_grad=False)
    live.move(ReadDigest("d0"))

    def commit_and_return(call: int) -> torch.Tensor | None:
        if call > 1:
            return None
        live.swap_in("d1", swap_of(weight, 7.0), base=BASE)
        committed = weight.detach().clone()
        assert live.previous is not None
        live.swap_back(base=BASE)
        return committed

    assert torch.equal(copied(copier, weight, commit_and_return), torch.ones(3))


@pytest.mark.parametrize(
    "write",
    [
        lambda live: live.write_in_place(["target"]),
        lambda live: live.move(Empty("gone")),
        lambda live: live.lose_name(),
    ],
)
def test_other_writes_within_a_copy_end_the_save(
    live: LiveWeights, copier: PieceCopier, write: Callable[[LiveWeights], None]
) -> None:
    weight = nn.Parameter(torch.ones(3), requires_grad=False)
    with pytest.raises(Conflict):
        copied(copier, weight, lambda _: write(live))


@pytest.mark.parametrize("shape", [(), (0,), (5,), (7, 3), (2, 5, 3), (1, 1, 40), (3, 0, 2)])
@pytest.mark.parametrize("most", [1, 4, 6, 1000])
def test_pieces_are_all_elements_in_their_order(shape: tuple[int, ...], most: int) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    for laid_out in (tensor, tensor.mT.contiguous().mT if len(shape) > 1 else tensor):
        pieces = [laid_out[index] for index in cut(laid_out.shape, most)]
        assert all(0 < piece.numel() <= most for piece in pieces)
        elements = [element for piece in pieces for element in piece.reshape(-1).tolist()]
        assert elements == tensor.reshape(-1).tolist()


def test_transposed_weight_larger_than_a_piece_is_copied_in_order(copier: PieceCopier) -> None:
    rows = CHUNK_BYTES // 4 // 1024 + 3
    weight = torch.randn(1024, rows).t()
    pieces = copier.pieces_of(weight, 0, never, UNPACED)
    assert torch.equal(torch.cat([p.clone() for p in pieces]), weight.reshape(-1))


@pytest.mark.parametrize("number", [True, False, None, 0, -3, 1.0, 0.1, float("inf")])
def test_numbers_come_back_as_they_were(number: float | None) -> None:
    parsed = parse_number(repr(number))
    assert (parsed, type(parsed)) == (number, type(number))


def test_dtype_without_a_name_is_refused() -> None:
    odd = torch.empty(2, dtype=torch.complex128)
    with pytest.raises(Refused, match="'w' is of torch"):
        write_head([("w", odd)], {})


def test_layouts_have_one_name_in_any_order() -> None:
    assert name_layout({"a": "1", "b": "2"}) == name_layout({"b": "2", "a": "1"})
    assert name_layout({"a": "1", "b": "2"}) != name_layout({"a": "1", "b": "3"})

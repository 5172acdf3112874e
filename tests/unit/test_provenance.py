"""A forward's tensors are told apart: made of weights, of a request, of constants, or unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from sglang_inflight.scheduler.forward_caches.provenance import Origin, Provenance

Of = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def fill_part(weight: torch.Tensor, table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(8)
    made[:4] = weight
    made[4:] = x
    return made


def fill_all(weight: torch.Tensor, table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made.copy_(weight)
    return made


def fill_outside(weight: torch.Tensor, table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Write past torch's dispatcher, as a Triton kernel does."""
    made = torch.zeros(4)
    made.numpy()[:] = weight.numpy()
    return made


def multiply_into(weight: torch.Tensor, table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(4)
    return torch.mul(weight, table, out=made)


@torch.compile(fullgraph=True, backend="eager")
def compiled(weight: torch.Tensor, table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return weight * x


OF: list[tuple[Of, Origin]] = [
    (lambda weight, table, x: torch.stack([weight, table]).half(), Origin.WEIGHTS),
    (lambda weight, table, x: weight.view(2, 2).t().contiguous(), Origin.WEIGHTS),
    (lambda weight, table, x: weight[x.long()], Origin.WEIGHTS | Origin.REQUEST),
    (lambda weight, table, x: torch.zeros_like(x), Origin.CONSTANTS),
    (lambda weight, table, x: torch.arange(4).cos() * table, Origin.CONSTANTS),
    (lambda weight, table, x: torch.empty_like(weight), Origin.UNKNOWN),
    (fill_part, Origin.WEIGHTS | Origin.REQUEST),
    (fill_all, Origin.WEIGHTS),
    (fill_outside, Origin.UNKNOWN),
    (multiply_into, Origin.WEIGHTS),
    (compiled, Origin.WEIGHTS | Origin.REQUEST),
]


@pytest.mark.parametrize(("make", "origin"), OF)
def test_origin_follows_memory(make: Of, origin: Origin) -> None:
    weight, table, x = torch.arange(4.0), torch.ones(4), torch.ones(4)
    unwatched = make(weight, table, x)
    provenance = Provenance([weight], [table], [x])
    with provenance:
        made = make(weight, table, x)
    assert provenance.failure is None
    assert provenance.origin_of(made) == origin
    if Origin.UNKNOWN not in origin:
        assert torch.equal(made, unwatched)


def test_memory_used_again_keeps_no_origin() -> None:
    weight = torch.ones(4)
    provenance = Provenance([weight], [], [])
    with provenance:
        for _ in range(20):
            weight.clone()
    made = [torch.from_numpy(torch.ones(4).numpy().copy()) for _ in range(20)]
    assert {provenance.origin_of(each) for each in made} == {Origin.UNKNOWN}


@pytest.mark.parametrize("reads", [False, True])
def test_number_of_a_request_is_not_read_from_weights(reads: bool) -> None:
    weight, x = torch.ones(4), torch.ones(4)
    provenance = Provenance([weight], [], [x])
    with provenance:
        float((weight * (2 if reads else x)).max())
    assert provenance.reads_numbers is reads

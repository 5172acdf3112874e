"""Received tensors are traced to the weights they reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from sglang_inflight.scheduler.update.checks.dataflow import (
    Dataflow,
    Kind,
    Target,
    Write,
)
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.errors import Refused

WEIGHT = torch.zeros(8)
OUTSIDE = torch.ones(8)


class Loading:
    def __init__(self, kind: Kind = Kind.WEIGHT, rate_limit: RateLimit | None = None) -> None:
        self.weight = WEIGHT.clone()
        self.writes: list[Write] = []
        targets = {memory_key(self.weight): Target(kind, "weight")}
        self.flow = Dataflow(targets, before_write=self.writes.append, rate_limit=rate_limit)

    def receive(self, name: str, tensor: torch.Tensor, *, is_alone: bool = True) -> torch.Tensor:
        self.flow.receive(name, tensor, is_alone=is_alone)
        return tensor

    def reached_by(self, load: Callable[[torch.Tensor, torch.Tensor], object]) -> set[str]:
        a, b = self.receive("a", torch.rand(8)), self.receive("b", torch.rand(8))
        with self.flow:
            load(a, b)
        return self.flow.reached


LOADS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object], set[str]]] = {
    "copy": (lambda w, a, b: w.copy_(a), {"a"}),
    "part": (lambda w, a, b: w[:4].copy_(a[4:]), {"a"}),
    "data": (lambda w, a, b: w.data.copy_(b), {"b"}),
    "item": (lambda w, a, b: w.__setitem__(slice(0, 4), b[:4]), {"b"}),
    "clone": (lambda w, a, b: w.copy_(a.clone().double().view(2, 4).t().reshape(8)), {"a"}),
    "fused": (lambda w, a, b: w.copy_(torch.cat([a, b])[4:12]), {"a", "b"}),
    "product": (lambda w, a, b: w.copy_(a * b), {"a", "b"}),
    "out": (lambda w, a, b: torch.add(a, b, out=w), {"a", "b"}),
    "foreach": (lambda w, a, b: torch._foreach_copy_([w], [b]), {"b"}),
    "through a buffer": (lambda w, a, b: w.copy_(torch.empty(8).copy_(a)), {"a"}),
    "a number": (lambda w, a, b: w.fill_(a[0].item()), {"a"}),
    "nothing": (lambda w, a, b: a + b, set()),
    "zeros": (lambda w, a, b: w.zero_(), set()),
    "itself": (lambda w, a, b: w.copy_(w.clone()), {"b"}),
    # written by a kernel outside torch's dispatch: attributed to the last received tensor
    "of unknown origin": (lambda w, a, b: w.copy_(OUTSIDE), {"b"}),
}


@pytest.mark.parametrize(("load", "reached"), LOADS.values(), ids=LOADS.keys())
def test_tensors_reaching_a_weight_are_found(
    load: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object], reached: set[str]
) -> None:
    loading = Loading()
    assert loading.reached_by(lambda a, b: load(loading.weight, a, b)) == reached
    wrote = load not in (LOADS["nothing"][0],)
    assert bool(loading.writes) is wrote


def test_unknown_memory_counts_for_all_gathered_tensors() -> None:
    loading = Loading()
    for name in "ab":
        loading.receive(name, torch.rand(8))
    loading.flow.receive_no_more()
    with loading.flow:
        loading.weight.copy_(OUTSIDE)
    assert loading.flow.reached == {"a", "b"}


def test_tensors_of_one_bucket_are_distinguished() -> None:
    loading = Loading()
    bucket = torch.rand(24)
    parts = {name: bucket[8 * at : 8 * at + 8] for at, name in enumerate("bac")}
    for at, (name, part) in enumerate(parts.items()):
        loading.receive(name, part, is_alone=at == 0)
    with loading.flow:
        loading.weight.copy_(parts["a"])
    assert loading.flow.reached == {"a"}


def test_reused_memory_belongs_to_newest_tensor() -> None:
    loading = Loading()
    memory = torch.rand(8)
    loading.receive("old", memory)
    loading.receive("new", memory)
    with loading.flow:
        loading.weight.copy_(memory)
    assert loading.flow.reached == {"new"}


def test_write_to_served_memory_is_refused_before_writing() -> None:
    loading = Loading(Kind.SERVED)
    with pytest.raises(Refused, match="writes 'weight' where it is being served"):
        loading.reached_by(lambda a, b: loading.weight.copy_(a))
    assert torch.equal(loading.weight, WEIGHT)


def test_write_to_another_models_weight_is_skipped() -> None:
    loading = Loading(Kind.FOREIGN)
    assert loading.reached_by(lambda a, b: loading.weight.copy_(a)) == {"a"}
    assert torch.equal(loading.weight, WEIGHT)
    assert loading.writes == []


def test_copy_to_a_weight_is_rate_limited() -> None:
    spent: list[int] = []

    class Seen(RateLimit):
        def spend(self, nbytes: int) -> None:
            spent.append(nbytes)

    loading = Loading(rate_limit=Seen(32 * 16, is_busy=lambda: True))
    loading.reached_by(lambda a, b: loading.weight.copy_(a))
    assert sum(spent) == 2 * loading.weight.nbytes
    assert len(spent) > 1


def test_operations_while_standing_by_are_not_traced() -> None:
    loading = Loading()

    def look(a: torch.Tensor, b: torch.Tensor) -> None:
        with loading.flow.untraced():
            assert a.max().item() <= 1

    assert loading.reached_by(look) == set()


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def test_loader_that_waits_for_other_ranks_is_refused_beside_their_steps(group: None) -> None:
    tensor = torch.ones(2)
    with (
        pytest.raises(Refused, match=r"communicates between ranks \(c10d\.allreduce_"),
        Dataflow({}, before_write=lambda write: None),
    ):
        dist.all_reduce(tensor)
    with Dataflow({}, before_write=lambda write: None, communicates=True):
        dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.ones(2))

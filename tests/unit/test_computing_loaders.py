"""A loader may read the weights that it writes, and compute with the tensors that it gets.

Each model here has one such habit of SGLang's loaders. An update that changes one element a tensor
equals a fresh load, or is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from sglang.srt.model_loader.weight_utils import composed_weight_loader, default_weight_loader
from sglang.srt.models.inkling_common import dense_mlp
from torch import nn
from torch.nn.functional import normalize

from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.vocabulary.errors import Refused
from tests.support.rank import Rank

Tensors = dict[str, torch.Tensor]
Weights = Iterable[tuple[str, torch.Tensor]]

STAGED = pytest.mark.parametrize("mode", [StagingMode.DEVICE, StagingMode.CHANGES])
pytestmark = pytest.mark.usefixtures("either_way")
SHAPE = 4, 6
DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Turn gradients off, like the staging thread."""
    with torch.no_grad():
        yield


class Model(nn.Module):
    """``embed`` and ``norm`` are in the checkpoint. ``head`` is what a habit makes of ``embed``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = (_parameter() for _ in range(3))

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.load(name, tensor)
        self.end()

    def load(self, name: str, tensor: torch.Tensor) -> None:
        default_weight_loader(dict(self.named_parameters())[name], tensor)

    def end(self) -> None:
        self.head.data.copy_(self.embed.data)


class ScalesInPlace(Model):
    def end(self) -> None:
        super().end()
        self.norm.data.mul_(0.5)


class Composes(Model):
    """Mamba2's ``A`` does so with its ``A_log``."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        # SGLang annotates a loader that returns nothing as one that returns a tensor
        copy: Any = default_weight_loader
        load = composed_weight_loader(copy, lambda x: -torch.exp(x.float()))
        load(dict(self.named_parameters())[name], tensor)


class ReadsByParts(Model):
    def end(self) -> None:
        for row in range(len(self.embed)):
            self.head.data[row].copy_(self.embed.data[row] + self.norm.data[row])


class Linearizes(Model):
    """Inkling's own lines keep a second copy of an expert's weight, beside the weights."""

    _refresh_bf16_linearized = next(
        c for c in vars(dense_mlp).values() if hasattr(c, "_refresh_bf16_linearized")
    )._refresh_bf16_linearized

    def __init__(self) -> None:
        super().__init__()
        self.n_shared_experts, self._linearized_bf16_enabled = 2, True
        self._bf16_linearized_ready = False
        self.w13_weight = _parameter(2, 4, 3)
        self.w2_weight = _parameter(2, 3, 2)
        self.register_buffer("_w2_lin", torch.zeros(4, 3, dtype=DTYPE), persistent=False)

    def end(self) -> None:
        super().end()
        self.w13_weight.data.view(-1).copy_(self.embed.data.view(-1))
        self.w2_weight.data.view(-1).copy_(self.norm.data.view(-1)[:12])
        self._refresh_bf16_linearized()


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape or SHAPE, dtype=DTYPE), requires_grad=False)


def checkpoint(changed: int | None = None) -> Tensors:
    """Return ``embed`` and ``norm``, with another value at the flat position ``changed``."""
    random = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(SHAPE, generator=random).to(DTYPE) for n in ("embed", "norm")}
    if changed is not None:
        for tensor in tensors.values():
            tensor.view(-1)[changed] += 1
    return tensors


def fresh(of: Callable[[], Model], tensors: Tensors) -> Model:
    model = of()
    model.load_weights(tensors.items())
    return model


def rank_of(mode: StagingMode, model: nn.Module) -> Rank:
    return Rank(mode, model, checkpoint_shapes={name: SHAPE for name in ("embed", "norm")})


def tensors_of(model: nn.Module) -> Tensors:
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def assert_same(model: nn.Module, expected: Tensors) -> None:
    found = tensors_of(model)
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


READERS = [Model, ScalesInPlace, Composes, ReadsByParts, Linearizes]


@STAGED
@pytest.mark.parametrize("of", READERS)
def test_loader_reads_the_elements_that_came_unchanged(
    mode: StagingMode, of: Callable[[], Model]
) -> None:
    model = fresh(of, checkpoint())
    rank = rank_of(mode, model)
    for changed in 7, None, 0:
        rank.update(checkpoint(changed))
        assert_same(model, tensors_of(fresh(of, checkpoint(changed))))


class ComputesTooSoon(Model):
    """Makes its head as ``norm`` comes, whether ``embed`` has come or not."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor)
        if name == "norm":
            self.head.data.copy_(self.embed.data * 2)

    def end(self) -> None:
        pass


class CopiesTooSoon(ComputesTooSoon):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        Model.load(self, name, tensor)
        if name == "norm":
            self.head.data.copy_(self.embed.data)


class DerivesTooSoon(ComputesTooSoon):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("doubled", torch.zeros(SHAPE, dtype=DTYPE), persistent=False)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        Model.load(self, name, tensor)
        self.head.data.copy_(tensor)
        if name == "norm":
            self.get_buffer("doubled").copy_(self.embed.data * 2)


@STAGED
@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (ComputesTooSoon, "computes with 'embed' before"),
        (CopiesTooSoon, "computes with 'embed' before"),
        (DerivesTooSoon, "computes with 'embed' before"),
    ],
)
def test_element_read_before_it_is_sent_is_refused(
    mode: StagingMode, of: Callable[[], Model], reason: str
) -> None:
    tensors = checkpoint()
    model = fresh(of, tensors)
    before = tensors_of(model)
    rank = rank_of(mode, model)
    tensors = checkpoint(7)
    sent = {"norm": tensors["norm"], "embed": tensors["embed"]}
    if rank.has_plan and of is CopiesTooSoon:
        # its plan is that of the checkpoint's order
        rank.update(sent)
        assert_same(model, tensors_of(fresh(of, tensors)))
    else:
        with pytest.raises(Refused, match=reason):
            rank.update(sent)
        assert_same(model, before)
    # a partial update leaves no element without a value
    rank.update({"norm": tensors["norm"]}, partial=True)


# ---- sparse tensors --------------------------------------------------------------------


class Patched(Model):
    """Makes nothing of several tensors."""

    make: Callable[[torch.Tensor], torch.Tensor]

    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, type(self).make(tensor))

    def end(self) -> None:
        pass


def patched(make: Callable[[torch.Tensor], torch.Tensor]) -> type[Patched]:
    return type("Patches", (Patched,), {"make": staticmethod(make)})


class AddsToTheWeight(Patched):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        dict(self.named_parameters())[name].data.zero_().add_(tensor)


class ScalesTheWeight(Patched):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        Model.load(self, name, tensor)
        dict(self.named_parameters())[name].data.mul_(0.5)


class ComposesIt(Patched):
    load = Composes.load


class FillsWithAMaximum(Patched):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        dict(self.named_parameters())[name].data.fill_(tensor.max().item())


class LooksAtZero(Patched):
    def load(self, name: str, tensor: torch.Tensor) -> None:
        Model.load(self, name, tensor if torch.any(tensor == 0) else tensor + 1)


COMPUTE: dict[str, type[Model]] = {
    # Baichuan2's head
    "normalizes rows": patched(normalize),
    # Bailing's and LLaDA2's
    "normalizes columns": patched(lambda t: normalize(t, dim=0)),
    "subtracts the mean": patched(lambda t: t - t.mean()),
    "replaces NaN": patched(torch.nan_to_num),
    "takes signs": patched(torch.sign),
    "rounds to integers": patched(lambda t: t.to(torch.int32).to(t.dtype)),
    "compares": patched(lambda t: (t > 0).to(t.dtype)),
    "adds its neighbour": patched(lambda t: t + t.roll(1)),
    "computes in place": patched(lambda t: t.clone().cumsum_(0)),
    "multiplies matrices": patched(lambda t: t @ torch.ones(6, 6, dtype=t.dtype)),
    "adds to the weight": AddsToTheWeight,
    "scales the weight": ScalesTheWeight,
    "composes": ComposesIt,
    "fills with a maximum": FillsWithAMaximum,
    "looks at zero": LooksAtZero,
    "adds one": patched(lambda t: t + 1),
    "scales in place": patched(lambda t: t.clone().mul_(0.5)),
}

MOVE: dict[str, type[Model]] = {
    "copies": patched(lambda t: t),
    "casts": patched(lambda t: t.float()),
    "transposes": patched(lambda t: t.t().contiguous().t()),
    "joins halves": patched(lambda t: torch.cat([*t.chunk(2)][::-1])),
    "stacks rows": patched(lambda t: torch.stack([*t])),
    "permutes rows": patched(lambda t: t[torch.tensor([3, 1, 0, 2])]),
}


def sparse(tensors: Tensors, changed: int) -> Tensors:
    at = torch.tensor([changed])
    return {
        f"{name}{half}": value
        for name, tensor in tensors.items()
        for half, value in ((".indices", at), (".values", tensor.view(-1)[at]))
    }


@STAGED
@pytest.mark.parametrize("of", COMPUTE.values(), ids=COMPUTE.keys())
def test_sparse_tensor_that_the_loader_computes_with_is_refused_by_name(
    mode: StagingMode, of: type[Model]
) -> None:
    model = fresh(of, checkpoint())
    before = tensors_of(model)
    rank = rank_of(mode, model)
    if rank.has_plan and of is COMPUTE["rounds to integers"]:
        # a plan knows casts of any kind
        rank.update(sparse(checkpoint(7), 7), partial=True, load_format="sparse")
        assert_same(model, tensors_of(fresh(of, checkpoint(7))))
        return
    with pytest.raises(Refused, match="send whole tensors embed, norm"):
        rank.update(sparse(checkpoint(7), 7), partial=True, load_format="sparse")
    assert_same(model, before)
    # a client sends the whole version then
    rank.update(checkpoint(7), partial=True)
    assert_same(model, tensors_of(fresh(of, checkpoint(7))))


@STAGED
@pytest.mark.parametrize("of", MOVE.values(), ids=MOVE.keys())
def test_sparse_tensor_that_the_loader_moves_equals_a_fresh_load(
    mode: StagingMode, of: type[Model]
) -> None:
    model = fresh(of, checkpoint())
    rank = rank_of(mode, model)
    if not rank.has_plan:
        with pytest.raises(Refused, match="send whole tensors embed, norm"):
            rank.update(sparse(checkpoint(7), 7), partial=True, load_format="sparse")
        return
    rank.update(sparse(checkpoint(7), 7), partial=True, load_format="sparse")
    assert_same(model, tensors_of(fresh(of, checkpoint(7))))


def test_refusal_names_the_sparse_tensor_alone() -> None:
    """A head is normalized, and embeddings are not."""

    class NormalizesTheHead(Patched):
        def load(self, name: str, tensor: torch.Tensor) -> None:
            Model.load(self, name, normalize(tensor) if name == "norm" else tensor)

    rank = rank_of(StagingMode.CHANGES, fresh(NormalizesTheHead, checkpoint()))
    if not rank.has_plan:
        pytest.skip("without a plan no tensor can be sent in parts")
    sent: dict[str, Any] = sparse(checkpoint(7), 7)
    with pytest.raises(Refused, match=r"send whole tensors norm$"):
        rank.update(sent, partial=True, load_format="sparse")
    del sent["norm.indices"], sent["norm.values"]
    rank.update(sent, partial=True, load_format="sparse")

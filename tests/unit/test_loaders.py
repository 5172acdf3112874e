"""An update equals a fresh load, or is refused: for any loader, in any number of calls.

The loader under test combines the habits of SGLang's loaders. Some gather all tensors and write
them sorted, keep a dict of parameters, or hold one half of a fused parameter for the other. Others
rename, split, ignore, copy past ``weight_loader``, or derive tensors from weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from sglang_inflight.messages import DIRECT
from sglang_inflight.scheduler.plans.record import Kind, record
from sglang_inflight.scheduler.update import jobs
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.shadow import fuse_scales
from sglang_inflight.scheduler.update.sources.sparse import pair_up
from sglang_inflight.scheduler.update.update import Update
from sglang_inflight.vocabulary.errors import Conflict, Refused, Unproven
from tests.support.pool import MASKING_LOADER
from tests.support.rank import Rank

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
Weights = Iterable[tuple[str, torch.Tensor]]

SHAPES = {
    "plain": (4,),
    "q": (2, 4),
    "k": (1, 4),
    "old_name": (3,),
    "both": (2, 5),
    "norm": (4,),
    "uncounted": (2,),
    # unused by this model
    "rotary.inv_freq": (2,),
    "mtp.plain": (4,),
}
IGNORED = {"rotary.inv_freq", "mtp.plain"}
HALVES = {"q", "k"}


@dataclass(frozen=True)
class Traits:
    gathers: bool = False
    caches: bool = False
    # assigns a new tensor to an attribute, like Sarvam's MLA
    replaces: bool = False
    # clones held tensors, like DeepSeek's loader
    clones: bool = False


class Model(nn.Module):
    def __init__(self, traits: Traits) -> None:
        super().__init__()
        self.traits = traits
        self.plain = parameter(4)
        self.qk = parameter(3, 4)
        self.new_name = parameter(3)
        self.first, self.second = parameter(5), parameter(5)
        self.norm = parameter(4)
        self.norm.weight_loader = self.load_norm  # type: ignore[attr-defined]
        self.uncounted = parameter(2)
        # no checkpoint has it
        self.norm_plus_one: torch.Tensor
        self.register_buffer("norm_plus_one", torch.ones(4), persistent=False)
        self.normalizer: torch.Tensor
        self.register_buffer("normalizer", torch.tensor(3.0))
        self.product: torch.Tensor | None = None

    def load_norm(self, weight: nn.Parameter, loaded: torch.Tensor) -> None:
        weight.data.copy_(loaded)
        self.norm_plus_one.copy_(weight.data).add_(1.0)

    def load_weights(self, weights: Weights) -> None:
        parameters = self.parameters_by_name()
        held: Tensors = {}
        for name, tensor in sorted(weights) if self.traits.gathers else weights:
            if name in IGNORED:
                continue
            if name in HALVES:
                held[name] = tensor.clone() if self.traits.clones else tensor
                if held.keys() == HALVES:
                    write(parameters["qk"], torch.cat([held.pop("q"), held.pop("k")]))
            elif name == "both":
                for part, half in zip(("first", "second"), tensor, strict=True):
                    write(parameters[part], half)
            elif name == "uncounted":
                parameters[name].data.copy_(tensor)
            else:
                write(parameters[{"old_name": "new_name"}.get(name, name)], tensor)
        if self.traits.replaces:
            self.product = self.plain.data * 2

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        if not self.traits.caches:
            return dict(self.named_parameters())
        if not hasattr(self, "_cached"):
            self._cached = dict(self.named_parameters())
        return self._cached


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)


def write(weight: nn.Parameter, loaded: torch.Tensor) -> None:
    getattr(weight, "weight_loader", default_weight_loader)(weight, loaded)


def tensors(version: float, names: Iterable[str] = SHAPES) -> Tensors:
    return {
        name: torch.arange(torch.Size(SHAPES[name]).numel()).view(SHAPES[name]) / 16 + version
        for name in names
    }


def fresh(traits: Traits, weights: Tensors) -> Model:
    model = Model(traits)
    model.load_weights(weights.items())
    return model


def tensors_read_by_forward(model: Model) -> Tensors:
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    if model.product is not None:
        found["product"] = model.product
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def are_equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def rank_of(
    mode: StagingMode,
    model: nn.Module,
    *,
    checkpoint: Iterable[str] = SHAPES,
    ties_head: bool = False,
) -> Rank:
    shapes = {name: SHAPES[name] for name in checkpoint}
    return Rank(mode, model, checkpoint_shapes=shapes, ties_head=ties_head)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Turn gradients off, like the staging thread."""
    with torch.no_grad():
        yield


BOTH_MODES = pytest.mark.parametrize(
    "mode", [StagingMode.DEVICE, StagingMode.CHANGES, StagingMode.OFF]
)
STAGED = pytest.mark.parametrize("mode", [StagingMode.DEVICE, StagingMode.CHANGES])
pytestmark = pytest.mark.usefixtures("either_way")
traits_of_loaders = st.builds(
    Traits, gathers=st.booleans(), caches=st.booleans(), clones=st.booleans()
)


@st.composite
def updates(draw: st.DrawFn) -> tuple[bool, list[list[str]]]:
    """Draw a partial or whole update, and the names of each of its calls."""
    partial = draw(st.booleans())
    names = list(SHAPES)
    if partial:
        names = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    names = draw(st.permutations(names))
    ends = sorted(draw(st.sets(st.integers(1, len(names)), max_size=3)) | {len(names)})
    calls = [names[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return partial, calls


@BOTH_MODES
@settings(max_examples=60, deadline=None)
@given(traits=traits_of_loaders, history=st.lists(updates(), min_size=1, max_size=3))
def test_update_equals_fresh_load_or_is_refused(
    mode: StagingMode, traits: Traits, history: list[tuple[bool, list[list[str]]]]
) -> None:
    served = tensors(1.0)
    model = fresh(traits, served)
    rank = rank_of(mode, model)
    for version, (partial, calls) in enumerate(history, 2):
        before = tensors_read_by_forward(model)
        sent = {name for call in calls for name in call}
        lacks_a_half = len(sent & HALVES) == 1 and not rank.has_plan
        pieces = [tensors(version, call) for call in calls]
        if lacks_a_half or sent <= IGNORED:
            # tensors without a weight may pass if the loader itself ignores them
            if lacks_a_half:
                with pytest.raises(Refused, match="only together with other tensors"):
                    rank.update(*pieces, partial=partial)
                if mode is StagingMode.OFF:
                    return
                assert are_equal(tensors_read_by_forward(model), before)
            continue
        rank.update(*pieces, partial=partial)
        served |= tensors(version, sent)
        assert are_equal(tensors_read_by_forward(model), state_of_fresh(traits, served))
        if mode is not StagingMode.OFF:
            rank.roll_back()
            assert are_equal(tensors_read_by_forward(model), before)
            rank.roll_back()


def state_of_fresh(traits: Traits, weights: Tensors) -> Tensors:
    return tensors_read_by_forward(fresh(traits, weights))


def test_equal_weights_have_equal_digests_in_every_mode() -> None:
    """The previous version has a digest only if a rollback can reach it."""
    found: dict[StagingMode, list[str | None]] = {}
    for mode in StagingMode.DEVICE, StagingMode.CHANGES, StagingMode.OFF:
        rank = rank_of(mode, fresh(Traits(), tensors(1.0)))
        found[mode] = []
        for version in (2.0, 1.0):
            rank.update(tensors(version))
            found[mode] += [rank.base_digest, rank.digest]
    before, second, known, first = found[StagingMode.DEVICE]
    assert (known, before) == (None, first)
    assert first != second
    assert found[StagingMode.CHANGES] == found[StagingMode.DEVICE]
    assert found[StagingMode.OFF] == [None, second, None, first]


@BOTH_MODES
def test_halves_of_fused_weight_in_two_calls_are_joined(mode: StagingMode) -> None:
    model = fresh(Traits(), tensors(1.0))
    rank = rank_of(mode, model)
    rest = [name for name in SHAPES if name != "k"]
    rank.update(tensors(2.0, rest), tensors(2.0, ["k"]))
    assert are_equal(tensors_read_by_forward(model), state_of_fresh(Traits(), tensors(2.0)))


def test_half_of_a_fused_weight_is_refused_or_goes_by_a_plan() -> None:
    model = fresh(Traits(), tensors(1.0))
    rank = rank_of(StagingMode.DEVICE, model)
    if rank.has_plan:
        rank.update(tensors(2.0, ["q", "plain"]), partial=True)
        served = tensors(1.0) | tensors(2.0, ["q", "plain"])
        assert are_equal(tensors_read_by_forward(model), state_of_fresh(Traits(), served))
        return
    with pytest.raises(Refused, match="loader takes q only together with other tensors"):
        rank.update(tensors(2.0, ["q", "plain"]), partial=True)
    assert are_equal(tensors_read_by_forward(model), state_of_fresh(Traits(), tensors(1.0)))


@BOTH_MODES
@pytest.mark.parametrize("traits", [Traits(), Traits(gathers=True)])
def test_names_are_checked_without_the_starts_checkpoint(mode: StagingMode, traits: Traits) -> None:
    """The start's checkpoint is not on this machine."""
    model = fresh(traits, tensors(1.0))
    rank = rank_of(mode, model, checkpoint=())
    names = SHAPES.keys() - IGNORED
    rank.update(tensors(2.0, sorted(names)), partial=True)
    assert are_equal(tensors_read_by_forward(model), state_of_fresh(traits, tensors(2.0)))
    with pytest.raises(Refused, match=r"no weight named 'mtp\.plain'"):
        rank.update(tensors(3.0, ["mtp.plain", "plain"]), partial=True)


def test_replaced_attribute_is_new_after_in_place_update() -> None:
    traits = Traits(replaces=True)
    model = fresh(traits, tensors(1.0))
    rank_of(StagingMode.OFF, model).update(tensors(2.0))
    assert are_equal(tensors_read_by_forward(model), state_of_fresh(traits, tensors(2.0)))


def test_replaced_attribute_refuses_later_staged_updates() -> None:
    model = fresh(Traits(replaces=True), tensors(1.0))
    before = tensors_read_by_forward(model)
    rank = rank_of(StagingMode.DEVICE, model)
    with pytest.raises(Refused, match="loading them replaces 'product'"):
        rank.update(tensors(2.0))
    opened: Any = SimpleNamespace(
        update_id="u", partial=False, may_be_empty=False, in_place=False, asks_digests=False
    )
    with pytest.raises(Refused, match="loading them replaces 'product'"):
        rank._jobs.prepare(Update(opened, base_version=""), None, after=None)
    assert are_equal(tensors_read_by_forward(model), before)


@pytest.mark.parametrize("traits", [Traits(), Traits(caches=True), Traits(gathers=True)])
def test_first_in_place_write_is_reported(traits: Traits) -> None:
    """A dict of parameters kept by the model holds the live parameters."""
    rank = rank_of(StagingMode.OFF, fresh(traits, tensors(1.0)))
    with pytest.raises(Refused, match="no weight named 'unheard-of'"):
        rank.update({"unheard-of": torch.ones(2)} | tensors(2.0, ["plain"]), partial=True)
    assert rank.writes == 0 or traits.gathers
    with pytest.raises(Refused, match="holds NaN"):
        rank.update(tensors(2.0, ["uncounted"]), {"plain": torch.full((4,), torch.nan)})
    assert rank.writes > 0


def test_update_keeps_tensor_in_no_checkpoint() -> None:
    """Gemma 2 registers its normalizer as a buffer, and a whole update does not contain it."""
    model = fresh(Traits(), tensors(1.0))
    rank_of(StagingMode.DEVICE, model).update(tensors(2.0))
    assert model.normalizer.item() == 3.0


def test_hollow_weights_need_no_tensor_in_no_checkpoint() -> None:
    model = fresh(Traits(), tensors(1.0))
    rank = rank_of(StagingMode.DEVICE, model)
    names = list(SHAPES)
    assert rank.fill_hollow(tensors(2.0, names[:4])) > 0
    assert rank.fill_hollow(tensors(2.0, names[4:])) == 0
    assert are_equal(tensors_read_by_forward(model), state_of_fresh(Traits(), tensors(2.0)))


@BOTH_MODES
def test_update_of_nothing_is_a_version_of_the_same_weights(mode: StagingMode) -> None:
    model = fresh(Traits(), tensors(1.0))
    rank = rank_of(mode, model)
    rank.update(tensors(2.0))
    before, first = tensors_read_by_forward(model), rank.digest
    for calls in list[Tensors](), [Tensors()]:
        rank.update(*calls, partial=True)
        assert rank.digest == first
        assert are_equal(tensors_read_by_forward(model), before)
        rank.roll_back()
        assert are_equal(tensors_read_by_forward(model), before)


@BOTH_MODES
def test_whole_update_of_nothing_is_refused(mode: StagingMode) -> None:
    with pytest.raises(Refused, match="the update holds no tensor"):
        rank_of(mode, fresh(Traits(), tensors(1.0))).update({}, partial=False)


@BOTH_MODES
def test_update_of_nothing_names_no_weights_without_contents(mode: StagingMode) -> None:
    with pytest.raises(Refused, match="the update holds no tensor"):
        rank_of(mode, fresh(Traits(), tensors(1.0))).fill_hollow({})


def test_base_of_changes_is_found_by_a_digest_that_nobody_has_computed_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "get_parallel", lambda: SimpleNamespace(pp_rank=0, tp_rank=0))
    rank = rank_of(StagingMode.CHANGES, fresh(Traits(), tensors(1.0)))
    rank.update(partial=True)
    assert rank.base_digest is not None
    opened: Any = SimpleNamespace(
        update_id="u", partial=True, may_be_empty=False, in_place=False, asks_digests=False
    )
    for digests, is_base in (("0" * 16, rank.base_digest), True), (("0" * 16,), False):
        update = Update(opened, base_version="v1")
        with nullcontext() if is_base else pytest.raises(Conflict, match=rank.base_digest):
            rank._jobs._require_base(update, digests)


def test_missing_weight_is_refused() -> None:
    rank = rank_of(StagingMode.DEVICE, fresh(Traits(), tensors(1.0)))
    with pytest.raises(Refused, match="not complete: 4 of 4 elements of 'plain' were not sent"):
        rank.update({name: t for name, t in tensors(2.0).items() if name != "plain"})


@BOTH_MODES
def test_direct_write_updates_derived_tensors(mode: StagingMode) -> None:
    """``GemmaRMSNorm`` derives in its parameter's loader, and a direct write skips the loader."""
    from sglang.srt.layers.layernorm import GemmaRMSNorm

    model: Any = nn.Module()
    model.norm = GemmaRMSNorm(4)
    rank_of(mode, model, checkpoint=()).update(
        {"norm.weight": torch.full((4,), 2.0)}, partial=True, load_format=DIRECT
    )
    assert model.norm.gemma_weight.tolist() == [3.0] * 4


class Finished(nn.Module):
    """A model with a ``product`` computed by SGLang after loading, like MLA's halves of
    ``kv_b_proj``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plain = parameter(4)
        self.product = torch.zeros(4)

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            write(dict(self.named_parameters())[name], tensor)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.product = self.plain.data * 2


def test_direct_write_runs_post_load_weights() -> None:
    model = Finished()
    rank = rank_of(StagingMode.OFF, model, checkpoint=())
    rank.update({"plain": torch.full((4,), 3.0)}, partial=True, load_format=DIRECT)
    assert model.product.tolist() == [6.0] * 4


def test_direct_write_to_quantized_weights_is_refused() -> None:
    class Transposes(QuantizeMethodBase):
        def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError

        def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise NotImplementedError

    model: Any = Finished()
    model.quant_method = Transposes()
    rank = rank_of(StagingMode.OFF, model, checkpoint=())
    with pytest.raises(Refused, match=r"load_format 'direct' .* is quantized by Transposes"):
        rank.update({"plain": torch.full((4,), 3.0)}, partial=True, load_format=DIRECT)
    assert rank.writes == 0
    assert model.plain.tolist() == [0.0] * 4


@BOTH_MODES
def test_update_refolds_routers_scale(mode: StagingMode) -> None:
    """Gemma 4's router folds its scale at the first forward, into a tensor in no checkpoint."""
    from sglang.srt.models.gemma4_causal import Gemma4Router

    config = SimpleNamespace(hidden_size=4, rms_norm_eps=1e-6, num_experts=2)
    router = Gemma4Router(config)
    model = Scaled(router)
    fuse_scales(model)
    rank = rank_of(mode, model, checkpoint=())
    rank.update({"router.scale": torch.full((4,), 3.0)}, partial=True)
    assert router.norm.weight.tolist() == [1.5] * 4
    if mode is StagingMode.DEVICE:
        rank.roll_back()
        assert router.norm.weight.tolist() == [0.5] * 4


class Scaled(nn.Module):
    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def load_weights(self, weights: Weights) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


def test_used_names_are_found_without_memory() -> None:
    for traits in (Traits(), Traits(gathers=True), Traits(caches=True), Traits(clones=True)):
        found = record(Model(traits), kinds_of(SHAPES))
        assert found.reached == SHAPES.keys() - IGNORED
        assert list(found.unwritten or ()) == ["normalizer"]


def test_used_names_of_an_aborted_dry_run_are_kept() -> None:
    class Stops(Model):
        def load_weights(self, weights: Weights) -> None:
            for name, tensor in weights:
                if name == "k" and not tensor.any():
                    continue
                write(self.parameters_by_name()[name], tensor)

    shapes = {name: SHAPES[name] for name in ("plain", "norm", "k", "uncounted")}
    found = record(Stops(Traits()), kinds_of(shapes))
    assert found.reached == {"plain", "norm", "uncounted"}
    assert found.unwritten is None


def kinds_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Kind]:
    return {name: Kind(shape, torch.float32) for name, shape in shapes.items()}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(4, 2)
        self.lm_head = self.embed_tokens

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if name != "lm_head.weight":
                self.embed_tokens.weight.data.copy_(tensor)


@BOTH_MODES
@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ({"lm_head.weight": 2.0}, "which were not sent"),
        ({"embed_tokens.weight": 2.0, "lm_head.weight": 3.0}, "differs from the embeddings"),
        ({"lm_head.weight": 3.0, "embed_tokens.weight": 2.0}, "differs from the embeddings"),
        ({"embed_tokens.weight": 2.0, "lm_head.weight": 2.0}, None),
        ({"embed_tokens.weight": 2.0}, None),
    ],
)
def test_tied_head_unlike_embeddings_is_refused(
    mode: StagingMode, sent: dict[str, float], reason: str | None
) -> None:
    model = Tied()
    model.embed_tokens.weight.data.fill_(1.0)
    rank = rank_of(mode, model, checkpoint=(), ties_head=True)
    calls = [{name: torch.full((4, 2), value)} for name, value in sent.items()]
    if reason is None:
        rank.update(*calls, partial=True)
        assert model.lm_head.weight.tolist() == [[2.0] * 2] * 4
        return
    with pytest.raises(Refused, match=reason):
        rank.update(*calls, partial=True)
    if mode is StagingMode.DEVICE:
        assert model.lm_head.weight.tolist() == [[1.0] * 2] * 4


def sparse_of(name: str, tensor: torch.Tensor, indices: list[int]) -> Tensors:
    at = torch.tensor(indices, dtype=torch.int32)
    return {f"{name}.indices": at, f"{name}.values": tensor.view(-1)[at.long()].clone()}


@STAGED
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sparse_update_equals_fresh_load_of_the_patched_tensors(
    mode: StagingMode, data: st.DataObject
) -> None:
    served = tensors(1.0)
    model = fresh(Traits(), served)
    rank = rank_of(mode, model)
    if not rank.has_plan:
        pytest.skip("without a plan no tensor can be sent in parts")
    names = sorted(set(SHAPES) - IGNORED - {"norm"})
    for version in 2, 3:
        before = tensors_read_by_forward(model)
        calls = []
        for _ in range(data.draw(st.integers(1, 2))):
            # both halves of a fused weight come in one call
            call: Tensors = {}
            chosen = set(data.draw(st.lists(st.sampled_from(names), min_size=1)))
            for name in chosen | (HALVES if chosen & HALVES else set()):
                count = served[name].numel()
                indices = data.draw(st.lists(st.integers(0, count - 1), unique=True))
                new = tensors(float(data.draw(st.integers(1, 3)) + version), [name])[name]
                call |= sparse_of(name, new, indices)
                served[name] = served[name].clone()
                served[name].view(-1)[indices] = new.view(-1)[indices]
            calls.append(call)
        rank.update(*calls, partial=True, load_format="sparse")
        assert are_equal(tensors_read_by_forward(model), state_of_fresh(Traits(), served))
        rank.roll_back()
        assert are_equal(tensors_read_by_forward(model), before)
        rank.roll_back()


BAD_SPARSE = {
    "out of range": ({"plain.indices": torch.tensor([99]), "plain.values": torch.ones(1)}, "99"),
    "below 0": ({"plain.indices": torch.tensor([-1]), "plain.values": torch.ones(1)}, "-1"),
    "twice": (
        {"plain.indices": torch.tensor([2, 1, 2]), "plain.values": torch.ones(3)},
        "index 2 comes twice",
    ),
    "lengths": ({"plain.indices": torch.tensor([2, 1]), "plain.values": torch.ones(3)}, "length"),
    "no values": ({"plain.indices": torch.tensor([2])}, "lacks 'plain.values'"),
    "no indices": ({"plain.values": torch.ones(1)}, "lacks 'plain.indices'"),
    "float indices": ({"plain.indices": torch.ones(1), "plain.values": torch.ones(1)}, "float32"),
    "whole tensor": ({"plain": torch.ones(1)}, r"NAME\.indices"),
    "unknown": ({"other.indices": torch.tensor([2]), "other.values": torch.ones(1)}, "'other'"),
    "computed from": (
        {"norm.indices": torch.tensor([2]), "norm.values": torch.ones(1)},
        "send whole tensors norm",
    ),
    "NaN": (
        {"plain.indices": torch.tensor([2]), "plain.values": torch.tensor([torch.nan])},
        "NaN or infinity",
    ),
    "whole numbers": (
        {"plain.indices": torch.tensor([2]), "plain.values": torch.tensor([1])},
        "int64",
    ),
}


@STAGED
@pytest.mark.parametrize(("sent", "named"), BAD_SPARSE.values(), ids=BAD_SPARSE.keys())
def test_bad_sparse_tensor_is_refused_by_name(mode: StagingMode, sent: Tensors, named: str) -> None:
    model = fresh(Traits(), tensors(1.0))
    before = tensors_read_by_forward(model)
    with pytest.raises(Refused, match=named):
        rank_of(mode, model).update(sent, partial=True, load_format="sparse")
    assert are_equal(tensors_read_by_forward(model), before)


@BOTH_MODES
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_custom_loader_that_masks_nan_in_copy_keeps_what_is_not_sent(
    mode: StagingMode, data: st.DataObject
) -> None:
    served = tensors(1.0)
    model = fresh(Traits(), served)
    rank = rank_of(mode, model)
    for version in 2, 3:
        calls = []
        for name in sorted(set(SHAPES) - IGNORED - {"norm"} - HALVES):
            count = served[name].numel()
            indices = data.draw(st.lists(st.integers(0, count - 1), unique=True))
            new = tensors(version, [name])[name]
            shape = {f"{name}.shape": torch.tensor(new.shape)}
            calls.append(sparse_of(name, new, indices) | shape)
            served[name] = served[name].clone()
            served[name].view(-1)[indices] = new.view(-1)[indices]
        rank.update(*calls, partial=True, load_format=MASKING_LOADER)
        assert are_equal(tensors_read_by_forward(model), state_of_fresh(Traits(), served))


@STAGED
def test_weight_that_cannot_be_staged_is_named_and_left_to_an_update_in_place(
    mode: StagingMode,
) -> None:
    """A weight with holes, such as a padded scale, is no reason to refuse every update."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = parameter(4)
            self.scale = nn.Parameter(torch.zeros(4, 6)[:, :3], requires_grad=False)

        def load_weights(self, weights: Weights) -> None:
            for name, tensor in weights:
                write(dict(self.named_parameters())[name], tensor)

    model = Padded()
    new = {"plain": torch.ones(4), "scale": torch.ones(4, 3)}
    shapes = {name: tensor.shape for name, tensor in new.items()}
    with pytest.raises(Unproven, match=r"'scale' cannot be staged: its memory has holes"):
        Rank(mode, model, checkpoint_shapes=shapes).update(new)
    assert not model.plain.any()
    Rank(StagingMode.OFF, model, checkpoint_shapes=shapes).update(new)
    assert model.scale.all()


def test_second_pair_for_a_tensor_in_one_sparse_call_is_refused() -> None:
    """The last value would win where both pairs name a position."""
    pairs = [
        pair
        for version in (1.0, 2.0)
        for pair in sparse_of("plain", tensors(version)["plain"], [2]).items()
    ]
    filled = pair_up(pairs, {"plain": (4,)}, {})
    with pytest.raises(Refused, match="sparse tensor 'plain' came twice in one call"):
        list(filled)

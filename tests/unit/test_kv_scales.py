"""KV scales are taken, are never lost because none came, and change only together with all KV."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import default_weight_loader, maybe_remap_kv_scale_name
from torch import nn

from sglang_inflight.messages import CommitCall, RollbackCall
from sglang_inflight.scheduler.update import commit as commit_module
from sglang_inflight.scheduler.update.commit import Commits
from sglang_inflight.scheduler.update.finished.places import tensors_of
from sglang_inflight.scheduler.update.finished.proof import find_recipe
from sglang_inflight.scheduler.update.live_machine import ReadDigest
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.swap import PreparedSwap, swap_for
from sglang_inflight.storages import memory_key
from sglang_inflight.vocabulary.bodies import BeginBody, EndBody, TensorBody
from sglang_inflight.vocabulary.errors import Refused
from sglang_inflight.vocabulary.kept_kv import FENCE, KVPolicy
from sglang_inflight.vocabulary.labels import VersionLabel
from tests.support.front_end import FrontEnd
from tests.support.front_end import no_arguments as no_arguments
from tests.support.rank import CPU, Rank, Tensors
from tests.support.ticks import run

pytestmark = pytest.mark.usefixtures("either_way")

K, V = "self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"
STAGED = [StagingMode.DEVICE, StagingMode.CHANGES]
ALL = [*STAGED, StagingMode.OFF]


def name_of(mode: StagingMode) -> str:
    return mode.name.lower()


class Quantized:
    """A configuration of quantization with scales for KV."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> BaseKVCacheMethod:
        config: Any = self
        return BaseKVCacheMethod(config)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config: Any = Quantized()
        self.q_proj = nn.Linear(2, 2, bias=False)
        self.attn = RadixAttention(1, 2, 1.0, 1, 0, quant_config=config, prefix="attn")


class Model(nn.Module):
    """One attention layer, whose checkpoint names scales as ModelOpt does."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = SelfAttention()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters: dict[str, Any] = dict(self.named_parameters())
        for name, tensor in weights:
            renamed = maybe_remap_kv_scale_name(
                f"model.{name}", {f"model.{n}": None for n in parameters}
            )
            assert renamed is not None
            default_weight_loader(parameters[renamed.removeprefix("model.")], tensor)


def checkpoint(k: float | None, v: float | None, weight: float = 1.0) -> Tensors:
    made = {"self_attn.q_proj.weight": torch.full((2, 2), weight)}
    scales = {K: k, V: v}
    return made | {n: torch.tensor(scale) for n, scale in scales.items() if scale is not None}


def serve(mode: StagingMode, start: Tensors) -> Rank:
    """Return a rank that serves the checkpoint ``start``, as SGLang loads and finishes it."""
    live, pristine = Model(), Model()
    with torch.no_grad():
        DefaultModelLoader.load_weights_only(live, iter(start.items()), CPU)
        DefaultModelLoader.postprocess_weights(live, CPU)
    rank = Rank(
        mode, live, checkpoint_shapes={name: tensor.shape for name, tensor in start.items()}
    )
    if mode is not StagingMode.OFF:
        loaded = {memory_key(tensor) for tensor in tensors_of(live).values()}
        recipe = find_recipe(pristine, live, CPU, start.items(), UNPACED, 1 << 30, loaded)
        rank.finish_after_loading(pristine, recipe)
    return rank


def scales(rank: Rank) -> list[float]:
    """Return the layer's scales: the tensors, and the numbers of the same values."""
    attn: Any = rank.model.get_submodule("self_attn.attn")
    assert [attn.k_scale_float, attn.v_scale_float] == [float(attn.k_scale), float(attn.v_scale)]
    return [attn.k_scale_float, attn.v_scale_float]


@pytest.mark.parametrize("mode", ALL, ids=name_of)
def test_scales_of_an_update_are_served(mode: StagingMode) -> None:
    rank = serve(mode, checkpoint(0.5, 0.25))
    rank.update(checkpoint(2.0, 4.0))
    assert scales(rank) == [2.0, 4.0]
    assert "k_scale_float' from 0.5 to 2.0" in (rank.voted.kv_scale or "")
    if mode is not StagingMode.OFF:
        rank.roll_back()
        assert scales(rank) == [0.5, 0.25]


@pytest.mark.parametrize("mode", ALL, ids=name_of)
def test_update_with_the_served_scales_needs_no_recomputation(mode: StagingMode) -> None:
    rank = serve(mode, checkpoint(0.5, 0.25))
    rank.update(checkpoint(0.5, 0.25, weight=3.0))
    assert rank.voted.kv_scale is None
    assert rank.model.get_parameter("self_attn.q_proj.weight")[0, 0].item() == 3.0


@pytest.mark.parametrize("sent", [(None, None), (None, 0.25), (0.5, None)])
@pytest.mark.parametrize("mode", ALL, ids=name_of)
def test_whole_update_without_a_scale_is_incomplete(
    mode: StagingMode, sent: tuple[float | None, float | None]
) -> None:
    rank = serve(mode, checkpoint(0.5, 0.25))
    missing = [name for name, scale in zip((K, V), sent, strict=True) if scale is None]
    with pytest.raises(Refused, match=rf"not complete: .*{missing[0]}"):
        rank.update(checkpoint(*sent))
    assert scales(rank) == [0.5, 0.25]


@pytest.mark.parametrize("names", [(K, V), (V, K)], ids=["k first", "v first"])
@pytest.mark.parametrize("mode", STAGED, ids=name_of)
def test_model_started_without_scales_takes_both(mode: StagingMode, names: tuple[str, str]) -> None:
    """SGLang makes one scale of both if it finishes the layer after the first."""
    rank = serve(mode, checkpoint(None, None))
    assert scales(rank) == [1.0, 1.0]
    sent = checkpoint(0.5, 0.25)
    rank.update(*({name: sent[name]} for name in (*names, "self_attn.q_proj.weight")))
    assert scales(rank) == [0.5, 0.25]


@pytest.mark.parametrize("mode", STAGED, ids=name_of)
def test_scales_brought_by_an_update_are_not_lost_to_a_later_one(mode: StagingMode) -> None:
    rank = serve(mode, checkpoint(None, None))
    rank.update(checkpoint(0.5, 0.25))
    with pytest.raises(Refused, match=r"'self_attn\.attn\.k_scale_float' is 0\.5, and no scale"):
        rank.update(checkpoint(None, None, weight=2.0))
    assert scales(rank) == [0.5, 0.25]
    rank.update({"self_attn.q_proj.weight": torch.ones(2, 2)}, partial=True)
    assert scales(rank) == [0.5, 0.25]


def test_dropped_update_in_place_does_not_hide_its_scales_from_the_next() -> None:
    """Running requests' KV has the scales of the last commit, and not those written since."""
    rank = serve(StagingMode.OFF, checkpoint(0.5, 0.25))
    served = rank.model.get_submodule("self_attn.attn")
    dropped = rank.begin()
    rank.send(dropped, [checkpoint(2.0, 4.0)])
    assert served.k_scale_float == 2.0
    rank.update(checkpoint(2.0, 4.0))
    assert "from 0.5 to 2.0" in (rank.voted.kv_scale or "")
    rank.update(checkpoint(2.0, 4.0))
    assert rank.voted.kv_scale is None


def test_change_that_the_kv_pool_would_not_see_is_refused() -> None:
    """NVFP4 pools copy the scales at the start."""
    rank = serve(StagingMode.DEVICE, checkpoint(0.5, 0.25))
    method = SimpleNamespace(needs_global_scale=lambda: True)
    pool = SimpleNamespace(get_kv_cache_quant_method=lambda: method)
    runner: Any = rank.shadowed.runner
    runner.token_to_kv_pool = pool
    with pytest.raises(Refused, match="KV pool goes on with the scales of the start"):
        rank.update(checkpoint(2.0, 0.25))
    assert scales(rank) == [0.5, 0.25]


CHANGE = "'attn.k_scale_float' from 0.5 to 2.0"
PIECE = TensorBody(serialized_named_tensors=[b""], non_blocking=True)


@pytest.mark.usefixtures("no_arguments")
@pytest.mark.parametrize("policy", ["fence", "keep", "recompute"])
@pytest.mark.parametrize("in_session", [False, True], ids=["call", "session"])
def test_changed_scale_is_committed_only_with_all_kv(policy: KVPolicy, in_session: bool) -> None:
    async def play() -> FrontEnd:
        front = FrontEnd()
        front.rank.kv_scale = CHANGE
        if not in_session:
            await front.call(msgspec.structs.replace(PIECE, kv_cache=policy))
            return front
        await front.call(BeginBody())
        await front.call(PIECE)
        await front.call(EndBody(non_blocking=True, kv_cache=policy))
        return front

    if policy == "recompute":
        front = run(play())
        (commit,) = [call for call in front.rank.told if isinstance(call, CommitCall)]
        # each rank must know it for a rollback
        assert commit.kv_scale == CHANGE
    else:
        with pytest.raises(Refused, match=r"the update changes 'attn\.k_scale_float'.*recompute"):
            run(play())


def test_rollback_of_a_changed_scale_needs_all_kv_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that changed no scale itself, of another pipeline stage, refuses it as well."""
    monkeypatch.setattr(commit_module, "is_true_on_any_rank", lambda here: here)
    scheduler: Any = SimpleNamespace(device="cpu")
    live = LiveWeights(scheduler)
    live.move(ReadDigest("before"))
    swap = PreparedSwap(how=swap_for(CPU))
    live.swap_in("now", swap, base=VersionLabel(0, "v0"), kv_scale=CHANGE)
    nothing: Any = SimpleNamespace()
    staging: Any = SimpleNamespace(why_no_rollback=lambda: None)
    versions: Any = SimpleNamespace(current="v1")
    commits = Commits(
        nothing, staging, live, versions, nothing, nothing, "", on_swap=nothing, choose_due=nothing
    )
    call = RollbackCall(weight_version=None, kept_kv=FENCE)
    with pytest.raises(Refused, match=r"the rollback changes 'attn\.k_scale_float'"):
        commits.roll_back(call)
    assert live.digest == "now"
    # the rollback of a rollback brings the other scale back
    live.swap_back(base=VersionLabel(1, "v1"))
    with pytest.raises(Refused, match=r"the rollback changes 'attn\.k_scale_float'"):
        commits.roll_back(call)

"""Tensors of an adapter that reach no module, by the modules of a server that is not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_inflight.extensions.adapters import weights as adapter_weights
from sglang_inflight.extensions.adapters.weights import _Slots, merge, take
from sglang_inflight.vocabulary.errors import Refused

EXPERTS = 4
LAYER = "base_model.model.model.layers.0"


class _Experts(nn.Module):
    def slice_moe_lora_a_weights(self) -> None: ...


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({"o_proj": nn.Linear(2, 2)})
        self.mlp = nn.ModuleDict({"experts": _Experts()})


def manager_of(*adapted: str, targets: set[str]) -> Any:
    """Return a manager of one layer, whose modules ``adapted`` take adapters."""
    layers = nn.ModuleDict({"layers": nn.ModuleList([_Layer()])})
    base = nn.ModuleDict({"model": layers})
    pool = SimpleNamespace(target_modules=targets, _get_num_experts=lambda _: EXPERTS)
    modules = dict(base.named_modules())
    return SimpleNamespace(
        base_model=base,
        memory_pool=pool,
        lora_modules=[{name: modules[name] for name in adapted}],
        embed_tokens_module=None,
        lm_head_module=None,
        dtype=torch.bfloat16,
    )


def adapter_of(*paths: str, targets: list[str] | str = "all", **config: Any) -> Any:
    names = [f"{path}.lora_{part}.weight" for path in paths for part in "AB"]
    weights = {name: torch.ones(2, 2) for name in names}
    return SimpleNamespace(
        layers=[SimpleNamespace(weights=weights)],
        embedding_layers={},
        config=SimpleNamespace(hf_config=config, target_modules=targets),
        inflight_received=names,
    )


@pytest.fixture(autouse=True)
def one_stage(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    parallel = SimpleNamespace(pp_size=1)
    monkeypatch.setattr(adapter_weights, "get_parallel", lambda: parallel)
    return parallel


O_PROJ, EXPERT = f"{LAYER}.self_attn.o_proj", f"{LAYER}.mlp.experts"
BOTH = ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.experts")
ALL = {"o_proj", "gate_up_proj", "down_proj"}


def test_tensors_of_adapted_modules_have_their_slots() -> None:
    adapter = adapter_of(
        O_PROJ, f"{EXPERT}.0.gate_up_proj", f"{EXPERT}.3.gate_up_proj", f"{EXPERT}.3.down_proj"
    )
    slots = [*_Slots(manager_of(*BOTH, targets=ALL), adapter)]
    assert [sorted(slot.names) for slot in slots] == [["A", "B"]] * 4


@pytest.mark.parametrize(
    ("served", "sent"),
    [
        ("o_proj", "self_attn.o_proj"),
        ("moe.experts", "experts.0.down_proj"),
        ("mlp.experts", "mlp.experts.down_proj"),
    ],
)
def test_model_may_leave_out_a_level_or_add_one(served: str, sent: str) -> None:
    """Qwen3.5 has no ``self_attn``, and Gemma 4 has its experts in a module of their own."""
    manager = manager_of(targets=ALL)
    module = _Experts() if "experts" in served else nn.Linear(2, 2)
    manager.lora_modules[0][f"model.layers.0.{served}"] = module
    assert len([*_Slots(manager, adapter_of(f"{LAYER}.{sent}"))]) == 1
    sent = sent.replace("self_attn.o_proj", "o_prj").replace("experts", "shared_experts")
    with pytest.raises(Refused, match="reaches no weight"):
        _Slots(manager, adapter_of(f"{LAYER}.{sent}"))


@pytest.mark.parametrize("half", ["gate_up_proj", "down_proj"])
def test_tensor_of_experts_without_adapters_is_refused(half: str) -> None:
    """SGLang gives experts adapters only if both halves are targets."""
    manager = manager_of("model.layers.0.self_attn.o_proj", targets={"o_proj", half})
    with pytest.raises(Refused, match=rf"experts\.0\.{half}\.lora_A.*reaches no weight"):
        _Slots(manager, adapter_of(O_PROJ, f"{EXPERT}.0.{half}"))


def test_merged_tensor_is_named_as_it_was_sent() -> None:
    manager = manager_of("model.layers.0.self_attn.o_proj", targets={"o_proj"})
    adapter = adapter_of(f"{EXPERT}.0.gate_up_proj")
    adapter.inflight_received = [
        f"{EXPERT}.0.{half}.lora_{part}.weight" for half in ("w1", "w3") for part in "AB"
    ]
    with pytest.raises(Refused, match=r"experts\.0\.w1\.lora_A\.weight', '.*\.w3\.lora_A\.weight"):
        _Slots(manager, adapter)


@pytest.mark.parametrize(
    ("paths", "config", "why"),
    [
        ((f"{EXPERT}.{EXPERTS}.down_proj",), {}, "has 4 experts"),
        ((f"{LAYER}.self_attn.qkv_proj",), {}, "nothing named"),
        ((O_PROJ, "layers.0.self_attn.o_proj"), {}, "reach one weight"),
        ((O_PROJ, f"{LAYER}.o_proj"), {}, "reach one weight"),
        ((f"{LAYER}.self_atn.o_proj",), {}, "nothing named"),
        ((f"{LAYER}.mlp.o_proj",), {}, "nothing named"),
        (("model.encoder.layers.0.self_attn.o_proj",), {}, "not of the language model"),
        ((O_PROJ,), {"layers_to_transform": [1]}, "layers_to_transform"),
        ((O_PROJ,), {"exclude_modules": ["o_proj"]}, "exclude_modules"),
        ((O_PROJ,), {"exclude_modules": "("}, "exclude_modules"),
    ],
)
def test_tensor_without_a_slot_is_refused(
    paths: tuple[str, ...], config: dict[str, Any], why: str
) -> None:
    with pytest.raises(Refused, match=why):
        _Slots(manager_of(*BOTH, targets=ALL), adapter_of(*paths, **config))


def test_module_outside_of_the_adapters_targets_is_refused() -> None:
    manager = manager_of(*BOTH, targets=ALL)
    with pytest.raises(Refused, match="target_modules"):
        _Slots(manager, adapter_of(O_PROJ, targets=["down_proj"]))


def test_another_stages_layers_are_left_to_it(one_stage: SimpleNamespace) -> None:
    manager = manager_of(*BOTH, targets=ALL)
    manager.base_model = nn.ModuleDict()
    one_stage.pp_size = 2
    assert [*_Slots(manager, adapter_of(O_PROJ))] == []


def test_two_modules_of_one_buffer_are_refused() -> None:
    """SGLang has a buffer for each target in a layer, and both modules would read it."""
    manager = manager_of(*BOTH, targets=ALL)
    manager.lora_modules[0]["model.layers.0.cross_attn.o_proj"] = nn.Linear(2, 2)
    with pytest.raises(Refused, match="one adapter for"):
        _Slots(manager, adapter_of(O_PROJ))


def test_tensor_that_cannot_be_merged_is_named() -> None:
    query = f"{LAYER}.self_attn.q_proj.lora_A.weight"

    def fail(_: object, names: list[str], weights: dict[str, torch.Tensor]) -> None:
        torch.cat([weights[query], torch.ones(2, 3)], 0)

    adapter: Any = None
    with pytest.raises(ValueError, match=rf"'{query}' cannot be merged"):
        merge(fail, adapter, [f"{O_PROJ}.lora_A.weight", query], {query: torch.ones(2, 2)})


def test_copy_of_the_bases_embeddings_is_left_out() -> None:
    """PEFT saves it beside an adapter of embeddings."""
    name = "base_model.model.lm_head.base_layer.weight"
    adapter = adapter_of(O_PROJ)
    take(_keep, adapter, name, torch.ones(2, 2))
    slots = [*_Slots(manager_of(*BOTH, targets=ALL), adapter)]
    assert len(slots) == 1


def _keep(adapter: Any, name: str, tensor: torch.Tensor) -> None:
    adapter.embedding_layers[name] = tensor


@pytest.mark.parametrize(
    ("part", "value", "why"),
    [
        ("A", float("nan"), "lora_A.* holds NaN"),
        ("B", float("-inf"), "lora_B.* holds NaN or infinity"),
        ("B", 3.4e38, r"lora_B.* that torch\.bfloat16 does not hold"),
        ("A", 1e30, "lora_A.* beyond 65504"),
        ("B", 4e4, "lora_B.* product beyond 65504"),
        ("B", 3e4, None),
        ("B", 0.0, None),
    ],
)
def test_values_that_overflow_are_refused(part: str, value: float, why: str | None) -> None:
    adapter = adapter_of(O_PROJ)
    adapter.scaling, adapter.config.r, adapter.config.lora_alpha = 0.5, 4, 2
    adapter.layers[0].weights[f"{O_PROJ}.lora_{part}.weight"][0, 1] = value
    slots = _Slots(manager_of(*BOTH, targets=ALL), adapter)
    (slot,) = slots
    if why is None:
        slots.refuse_not_finite(slot)
    else:
        with pytest.raises(Refused, match=why):
            slots.refuse_not_finite(slot)

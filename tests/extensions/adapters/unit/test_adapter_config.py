"""Fields of ``adapter_config.json`` that SGLang ignores."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.lora.lora_config import LoRAConfig

from sglang_inflight.extensions.adapters.config import (
    excludes,
    layers_of,
    read_config,
    refuse_fields,
    scale,
)

BASE = {"peft_type": "LORA", "r": 16, "lora_alpha": 8, "target_modules": ["o_proj"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"alora_invocation_tokens": [1]},
        {"alpha_pattern": {"o_proj": 32}},
        {"arrow_config": {"top_k": 1}},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"ensure_weight_tying": True},
        {"fan_in_fan_out": True},
        {"init_lora_weights": "loftq"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "pissa_niter_16"},
        {"kasa_config": {"beta": 0.1}},
        {"layer_replication": [[0, 1]]},
        {"layers_pattern": "h", "layers_to_transform": [0]},
        {"layers_to_transform": "0"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"monteclora_config": {"num_samples": 2}},
        {"rank_pattern": {"o_proj": 4}},
        {"target_parameters": ["experts.gate_up_proj"]},
        {"trainable_token_indices": [3]},
        {"unheard_of": 0.5},
        {"use_bdlora": {"nblocks": 2}},
        {"use_dora": True},
        {"use_qalora": True},
        {"use_rslora": "yes"},
    ],
    ids=str,
)
def test_field_that_changes_the_computation_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))}="):
        refuse_fields(BASE | fields)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("lora_alpha", [1e38, 10**400, float("nan"), float("inf"), "8", None, True]),
        ("peft_type", [None, "IA3", 1]),
        ("r", [0, -1, "4", 4.0, None, True]),
        ("target_modules", [None, 3, [1], {"o_proj": 1}]),
    ],
)
def test_field_without_meaning_is_refused(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{field}="):
            refuse_fields(BASE | {field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"alpha_pattern": {"o_proj": 8}, "rank_pattern": {"o_proj": 16}},
        {"auto_mapping": {"parent_library": "transformers"}, "task_type": "CAUSAL_LM"},
        {"bias": None, "unheard_of": None, "modules_to_save": []},
        {"eva_config": {"rho": 2.0}, "init_lora_weights": "eva"},
        {"inference_mode": True, "lora_dropout": 0.1, "revision": "main"},
        {"layers_pattern": "layers", "layers_to_transform": 1},
        {"loftq_config": {"loftq_bits": 4}, "init_lora_weights": False},
        {"lora_alpha": 16.0, "use_rslora": True},
        {"runtime_config": {"ephemeral_gpu_offload": False}},
        {"target_modules": "all-linear", "exclude_modules": ["visual"]},
    ],
    ids=str,
)
def test_field_without_influence_passes(fields: dict[str, Any]) -> None:
    refuse_fields(BASE | fields)


@pytest.mark.parametrize(("fields", "scaling"), [({}, 0.5), ({"use_rslora": True}, 2.0)])
def test_rank_stabilized_adapter_is_scaled_by_the_root(
    fields: dict[str, Any], scaling: float
) -> None:
    adapter: Any = SimpleNamespace(config=SimpleNamespace(hf_config=BASE | fields), scaling=0.5)
    scale(None, adapter)
    assert adapter.scaling == scaling


def test_layers_and_excluded_modules_are_read_as_peft_reads_them() -> None:
    assert layers_of({"layers_to_transform": []}) is None
    assert layers_of({"layers_to_transform": 2}) == frozenset({2})
    path = "model.visual.layers.0.self_attn.o_proj"
    for named in ("o_proj", "self_attn.o_proj", path):
        assert excludes({"exclude_modules": [named]}, path)
    assert not excludes({"exclude_modules": ["proj", "visual"]}, path)
    assert excludes({"exclude_modules": r".*visual.*"}, path)
    assert not excludes({"exclude_modules": "visual"}, path)


@pytest.mark.parametrize(
    ("text", "why"), [('{"r": 4', "no JSON"), ("[]", "no object"), ("{}", "no field")]
)
def test_unreadable_configuration_says_so(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"adapter_config\.json .*{why}"):
        read_config(_read, _unread(), str(tmp_path))


def test_configuration_is_read_by_sglang(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(BASE))
    config = _unread()
    read_config(_read, config, str(tmp_path))
    assert (config.r, config.target_modules) == (16, ["o_proj"])


def _unread() -> Any:
    return LoRAConfig.__new__(LoRAConfig)


_read: Any = LoRAConfig.__init__

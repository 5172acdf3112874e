"""The table of what a server can do, from real arguments of SGLang."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import default_cuda_graph_config
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.server_args import ServerArgs

from harness.marker import CONFIG
from sglang_inflight import capabilities
from sglang_inflight.extension import all_extensions
from sglang_inflight.frontend.frontend import _merge
from sglang_inflight.vocabulary.answers import Capabilities

ROWS = set(Capabilities.__struct_fields__)
# rows of a server whose loop has no pause states
NO_PAUSE = {
    "pause", "retract", "in_place", "recompute", "kv_max_age", "keep_weights", "move_adapters",
    "pin",
}  # fmt: skip
# rows of a server of a pair
A_PAIR = {
    *("in_place", "recompute", "kv_max_age", "keep_weights", "move_adapters", "pin"),
    *("forced_tokens", "continued"),
}
STORE = {"fence", "recompute", "kv_max_age", "pin"}
# SGLang composes the parameters at run time
ARGUMENTS: Any = ServerArgs


def refused(**args: Any) -> dict[str, str]:
    """Return the rows refused for a server with adapters and ``args``."""
    table = capabilities.of(ARGUMENTS(**{"model_path": "", "enable_lora": True, **args}))
    return {row: why for row, why in table.as_json().items() if why is not None}


def graphs(*, decode: str, prefill: str) -> Any:
    """Return SGLang's settings of CUDA graphs, with these backends."""
    config = default_cuda_graph_config()
    config.decode.backend, config.prefill.backend = decode, prefill
    return config


@pytest.mark.parametrize(
    ("args", "rows", "words"),
    [
        ({}, set(), ""),
        (
            {"tp_size": 8, "enable_hierarchical_cache": True},
            {"move_adapters"},
            "hier",
        ),
        ({"enable_lora": False}, {"move_adapters"}, "--enable-lora"),
        ({"dp_size": 2}, {"move_adapters"}, "--dp-size"),
        ({"pp_size": 2}, {"in_place", "kv_max_age", "move_adapters", "pin"}, "--pp-size"),
        ({"speculative_algorithm": "NGRAM"}, {"pin", "forced_tokens", "continued"}, "speculative"),
        ({"attn_dp_size": 2, "tp_size": 2}, {"pin"}, "--enable-dp-attention"),
        ({"pp_size": 2, "attn_dp_size": 2}, NO_PAUSE, "--pp-size"),
        (
            {"pp_size": 2, "speculative_algorithm": "NGRAM"},
            NO_PAUSE | {"forced_tokens", "continued"},
            "--pp-size|speculative decoding",
        ),
        (
            {"pp_size": 2, "disaggregation_mode": "prefill"},
            NO_PAUSE | {"forced_tokens", "continued"},
            "--pp-size|--disaggregation-mode",
        ),
        ({"enable_pdmux": True}, NO_PAUSE | {"stage"}, "--enable-pdmux"),
        ({"disaggregation_mode": "prefill"}, A_PAIR, "--disaggregation-mode"),
        ({"enable_lmcache": True}, STORE, "LMCache"),
        ({"enable_flexkv": True}, STORE, "FlexKV"),
        ({"weight_cache_mode": "daemon"}, {"stage", "in_place"}, "--weight-cache-mode daemon"),
        ({"weight_cache_mode": "client"}, {"stage", "in_place"}, "--weight-cache-mode client"),
        ({"offload_group_size": 4}, {"stage", "in_place"}, "--offload-group-size"),
        ({"encoder_only": True}, ROWS, "no scheduler"),
        ({"language_only": True}, set(), ""),
        ({"enable_torch_compile": True, "device": "cuda"}, set(), ""),
        # the reference platform compiles nothing
        ({"enable_torch_compile": True, "device": "cpu"}, set(), ""),
        ({"kt_weight_path": "/w"}, {"stage", "in_place"}, "--kt-weight-path"),
        ({"ple_offload_embedding": True}, {"stage", "in_place"}, "--ple-offload-embedding"),
        (
            {"enable_elastic_expert_backup": True},
            {"stage", "in_place"},
            "--enable-elastic-expert-backup",
        ),
        ({"enable_unified_cache_external_linker": True}, STORE, "external-linker"),
        ({"radix_cache_backend": "ours"}, STORE, "--radix-cache-backend ours"),
        # no step comes between the first write in place and the last
        ({"enable_eplb": True}, {"stage"}, "--enable-eplb"),
        ({"elastic_ep_backend": "mooncake"}, {"stage"}, "--elastic-ep-backend"),
    ],
    # the order of a set's rows is not the same in two processes
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)
def test_arguments_refuse_rows_with_a_reason(
    args: dict[str, Any], rows: set[str], words: str
) -> None:
    said = refused(**args)
    assert set(said) == rows
    assert all(re.search(words, why) for why in said.values()), said


def test_cpu_engine_that_compiles_weights_into_code_takes_no_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capabilities, "current_platform", CpuSRTPlatform())
    said = refused(enable_torch_compile=True, device="cpu")
    assert set(said) == {"stage", "in_place"}
    assert all("--enable-torch-compile" in why for why in said.values())


def test_hierarchical_cache_in_a_pipeline_keeps_prefixes() -> None:
    said = refused(pp_size=2, enable_hierarchical_cache=True)
    assert set(said) == STORE | {"in_place", "move_adapters"}
    assert "--enable-hierarchical-cache" in said["fence"]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({}, None),
        ({"enable_lora": True}, "--enable-lora"),
        ({"api_key": "secret"}, "--api-key"),
    ],
    ids=str,
)
def test_decode_server_retracts_what_a_prefill_request_carries(
    tmp_path: Path, args: dict[str, Any], why: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    decode = {"model_path": str(tmp_path), "disaggregation_mode": "decode", "enable_lora": False}
    said = refused(**(decode | args))
    assert set(said) - {"retract"} == A_PAIR
    assert said.get("retract") is None if why is None else why in said["retract"]


def test_decode_server_of_images_does_not_retract(monkeypatch: pytest.MonkeyPatch) -> None:
    images = SimpleNamespace(is_multimodal=True)
    monkeypatch.setattr(capabilities, "model_config_of", lambda args: images)
    assert "images" in refused(disaggregation_mode="decode", enable_lora=False)["retract"]


def test_cpu_offload_allows_in_place_without_graphs() -> None:
    for on in (
        {"decode": "disabled", "prefill": "full"},
        {"decode": "full", "prefill": "disabled"},
    ):
        said = refused(cpu_offload_gb=4, cuda_graph_config=graphs(**on))
        assert set(said) == {"stage", "in_place"}
        assert "without CUDA graphs" in said["in_place"]
    off = graphs(decode="disabled", prefill="disabled")
    said = refused(cpu_offload_gb=4, cuda_graph_config=off)
    assert set(said) == {"stage"}
    assert "--cpu-offload-gb" in said["stage"]


def test_attached_store_refuses_fence_and_recompute() -> None:
    can = capabilities.of(ARGUMENTS(model_path="", enable_lora=True))
    hicache: Any = SimpleNamespace(enable_hierarchical_cache=True, hicache_storage_backend=None)
    assert capabilities.with_store(can, hicache) == can
    hicache.hicache_storage_backend = "mooncake"
    said = capabilities.with_store(can, hicache)
    assert {row for row in ROWS if said[row] is not None} == STORE
    assert "--hicache-storage-backend mooncake" in (said.fence or "")
    hicache.enable_hierarchical_cache = False
    assert capabilities.with_store(can, hicache) == can


def test_status_merges_the_reasons_of_all_ranks() -> None:
    stages = [Capabilities(), Capabilities(stage="is quantized by Fp8")]
    assert _merge(stages) == stages[1]


def test_server_without_an_extension_for_pins_refuses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rest = tuple(each for each in all_extensions() if "pin" not in each.offers)
    monkeypatch.setattr(capabilities, "extensions_on", lambda: rest)
    assert refused().keys() == {"pin"}

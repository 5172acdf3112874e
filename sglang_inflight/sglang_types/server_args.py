"""A server's arguments, before and while they are resolved."""

from __future__ import annotations

from typing import Protocol

from sglang_inflight.sglang_types.configuration import GraphConfig
from sglang_inflight.sglang_types.describes import describes

_FIELDS = "sglang.srt.arg_groups.fields"


@describes(
    "sglang.srt.server_args.ServerArgs",
    f"{_FIELDS}.device.Device",
    f"{_FIELDS}.model.Model",
    f"{_FIELDS}.parallel.Parallel",
    f"{_FIELDS}.serving.Serving",
    f"{_FIELDS}.disagg.Disagg",
    f"{_FIELDS}.exec_.ExecGraph",
    f"{_FIELDS}.exec_.ExecMoe",
    f"{_FIELDS}.exec_.ExecOffload",
    f"{_FIELDS}.lora.Lora",
    f"{_FIELDS}.memory.Memory",
    f"{_FIELDS}.spec.Spec",
)
class ServerArgs(Protocol):
    """SGLang's arguments, with fields collected from the classes above."""

    model_path: str
    revision: str | None
    trust_remote_code: bool
    quantization: str | None
    dtype: str
    sleep_on_idle: bool
    tp_size: int
    pp_size: int
    dp_size: int
    enable_dp_attention: bool
    attn_dp_size: int
    enable_dp_attention_local_control_broadcast: bool
    dwdp_size: int
    elastic_ep_backend: str | None
    tokenizer_worker_num: int
    use_ray: bool
    disaggregation_mode: str
    enable_pd_role_switch: bool
    enable_pdmux: bool
    api_key: str | None
    weight_cache_mode: str
    enable_eplb: bool
    cpu_offload_gb: int
    # below 1 if no layer is offloaded
    offload_group_size: int
    cuda_graph_config: GraphConfig
    enable_lora: bool | None
    enable_hierarchical_cache: bool
    hicache_storage_backend: str | None
    enable_lmcache: bool
    enable_flexkv: bool
    speculative_algorithm: str | None

    def resolve_once(self) -> None: ...


@describes("sglang.srt.server_args.PortArgs")
class PortArgs(Protocol):
    tokenizer_ipc_name: str

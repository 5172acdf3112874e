"""Answers about the server for vLLM's clients: its configuration, and checksums of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import Request
from sglang.srt.entrypoints.http_server import server_info
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import CheckWeightsReqInput

from sglang_inflight.sglang_types import get_lora, get_parallel
from sglang_inflight.vocabulary.errors import RankFailed

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager


class ServerInfo:
    """SGLang's answer, with vLLM's configuration added for ``config_format=json``.

    TRL reads the configuration before it trains. Only fields read by TRL are present: most of
    vLLM's configuration has no meaning here.
    """

    def __init__(self, tokenizer_manager: TokenizerManager) -> None:
        self._tokenizer_manager = tokenizer_manager

    async def answer(self, request: Request) -> dict[str, Any]:
        info: dict[str, Any] = await server_info()
        if request.query_params.get("config_format") == "json":
            info["vllm_config"] = self._config()
        return info

    def _config(self) -> dict[str, Any]:
        model, parallel, lora = self._tokenizer_manager.model_config, get_parallel(), get_lora()
        raw = envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get()
        return {
            "model_config": {
                "model": self._tokenizer_manager.model_path,
                "dtype": str(model.dtype),
                "max_model_len": model.context_len,
                # raw: before temperature; processed: after
                "logprobs_mode": "raw_logprobs" if raw else "processed_logprobs",
            },
            "parallel_config": {
                "tensor_parallel_size": parallel.tp_size,
                "pipeline_parallel_size": parallel.pp_size,
                "data_parallel_size": parallel.dp_size,
            },
            "lora_config": _lora_config() if lora.enable_lora else None,
            # a placeholder: init_weight_transfer_engine chooses the backend
            "weight_transfer_config": {"backend": "nccl"},
        }


def _lora_config() -> dict[str, Any]:
    lora = get_lora()
    return {
        # 0 if unset: SGLang then takes the rank from the adapters loaded at start
        "max_lora_rank": lora.max_lora_rank or 0,
        "max_loras": lora.max_loras_per_batch,
        "max_cpu_loras": lora.max_loaded_loras,
    }


async def read_checksums(tokenizer_manager: TokenizerManager) -> dict[str, str]:
    """Return checksums by ``dp….pp….tp….<tensor name>``. Blocks the schedulers' loops meanwhile.

    Raises ``RankFailed`` if a rank cannot read its weights.
    """
    success, message, ranks, _ = await tokenizer_manager.check_weights(
        CheckWeightsReqInput(action="checksum", selector="target")
    )
    if not success or ranks is None:
        raise RankFailed(f"the weights could not be read: {message}")
    return {
        f"{_prefix(rank['parallelism_info'][0])}.{name}": checksum
        for rank in ranks
        for name, checksum in rank["checksums"].items()
    }


def _prefix(place: dict[str, Any]) -> str:
    return f"dp{place['dp_rank']}.pp{place['pp_rank']}.tp{place['tp_rank']}"


def mismatches(ours: dict[str, str], baseline: dict[str, str]) -> list[str]:
    """Return tensors with different checksums, or missing in one of the two."""
    return sorted(
        name for name in ours.keys() | baseline.keys() if ours.get(name) != baseline.get(name)
    )

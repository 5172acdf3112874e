"""Memory that each form of staging keeps between updates, in tokens of the KV cache.

An update needs more while it is open: ``changes`` keeps the changed elements, in memory that SGLang
leaves free beside the KV cache.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.model_config import AttentionArch, ModelConfig

from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.sources.checkpoint_files import find_checkpoint
from sglang_inflight.sglang_types import get_parallel

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import Scheduler, ServerArgs

logger = logging.getLogger(__name__)

_GIB = 1 << 30


def kv_tokens_by_form(nbytes: int, device: str, token_bytes: float) -> dict[str, int]:
    """Return how many tokens of KV have the size of each form's memory, by the form's name.

    ``nbytes``: of one rank's weights. ``device``: its type. ``token_bytes``: the KV of one token on
    that rank. Empty for a server without a KV cache. Memory beside the device holds no KV.
    """
    if token_bytes <= 0:
        return {}
    copy = int(nbytes / token_bytes)
    return {"changes": 0, "host": copy if device == "cpu" else 0, "device": copy, "off": 0}


def log_cost(mode: StagingMode, tokens: dict[str, int], scheduler: Scheduler) -> None:
    """Log each form's ``tokens``; warn if ``mode`` took some of them from the KV cache."""
    if not tokens or get_parallel().tp_rank:
        return
    took = scheduler.device != "cpu" and tokens[mode.name.lower()]
    logger.log(
        logging.WARNING if took else logging.INFO,
        "Memory of each form of staging, in tokens of KV (the cache holds %d): %s.%s",
        scheduler.max_total_num_tokens,
        ", ".join(f"{form} {tokens[form]}" for form in sorted(tokens, key=tokens.__getitem__)),
        " The cache would hold those of a second copy, too: SGLANG_INFLIGHT_STAGING=changes takes "
        "none, host takes the host's memory instead."
        if took
        else "",
    )


def kv_token_bytes(scheduler: Scheduler) -> float:
    """Return the bytes of one token's KV on this rank, by SGLang's own accounting; 0 if unknown."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    return pool.mem_usage * _GIB / max(1, scheduler.max_total_num_tokens)


def estimate(server_args: ServerArgs) -> dict[str, int]:
    """Return about what ``kv_tokens_by_form`` gives, from a server's arguments and its checkpoint.

    Empty without a checkpoint in safetensors on this machine.
    """
    config = ModelConfig.from_server_args(server_args)
    folder = find_checkpoint(server_args.model_path, server_args.revision, server_args.download_dir)
    nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not nbytes:
        return {}
    stored = getattr(config.hf_text_config, "dtype", None)
    if isinstance(stored, torch.dtype) and config.quantization is None:
        nbytes = nbytes // stored.itemsize * config.dtype.itemsize
    ranks = server_args.tp_size * server_args.pp_size
    token_bytes = _kv_elements(config, server_args) * _kv_dtype(config, server_args).itemsize
    return kv_tokens_by_form(nbytes // ranks, server_args.device or "cpu", token_bytes)


def _kv_elements(config: Any, server_args: ServerArgs) -> int:
    """Return the elements of one token's KV on a rank. ``config``: SGLang's ``ModelConfig``."""
    layers: int = -(-config.num_hidden_layers // server_args.pp_size)
    if config.attention_arch is AttentionArch.MLA:
        latent: int = config.kv_lora_rank + config.qk_rope_head_dim
        return layers * latent
    heads: int = config.get_num_kv_heads(server_args.tp_size)
    width: int = config.head_dim + config.v_head_dim
    return layers * heads * width


def _kv_dtype(config: ModelConfig, server_args: ServerArgs) -> torch.dtype:
    return torch.float8_e4m3fn if "fp8" in server_args.kv_cache_dtype else config.dtype

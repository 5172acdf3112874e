"""The scales by which attention layers quantize KV.

SGLang keeps a layer's scales as tensors, and as Python numbers of the same values. KV written with
one scale would be read with the one served then. So an update changes scales only with all KV.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from sglang_inflight.scheduler.update.finished.places import Number, Place, numbers_of

_NUMBERS = frozenset({"k_scale_float", "v_scale_float", "idx_k_scale_float", "idx_v_scale_float"})


def is_kv_scale(place: Place) -> bool:
    """Return whether ``place``, of a number, holds a KV scale."""
    return place.attribute in _NUMBERS


def kv_scales_of(model: nn.Module) -> dict[Place, Number]:
    """Return the served KV scales of ``model``."""
    return {at: found[2] for at, found in numbers_of(model).items() if is_kv_scale(at)}


def describe_change(place: Place, before: Number, after: Number) -> str:
    return f"{str(place)!r} from {before} to {after}"


def are_copied(runner: Any) -> bool:
    """Return whether the KV pool of ``runner`` has copied the scales at the start (NVFP4)."""
    pool = getattr(runner, "token_to_kv_pool", None)
    method = pool.get_kv_cache_quant_method() if pool is not None else None
    return method is not None and bool(method.needs_global_scale())

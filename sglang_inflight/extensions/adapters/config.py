"""Fields of an adapter's configuration (PEFT's ``adapter_config.json``): honoured or refused.

SGLang reads ``r``, ``lora_alpha``, ``target_modules`` and ``use_dora`` alone. An adapter that needs
another field would be served at another strength, or in part, under its own name. A field that
only says how the adapter was trained passes. An unknown field passes if it is off.

The functions here are hooks of SGLang's ``LoRAConfig`` and ``LoRAAdapter``. So they see every
adapter, whichever way it comes, and those of the server's start. SGLang answers a ``ValueError``
with its text. They run on the scheduler's thread.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_inflight.hooking import AFTER, AROUND, LORA, hook
from sglang_inflight.vocabulary.errors import shorten

if TYPE_CHECKING:
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig

    class PatchedLoRAConfig(LoRAConfig):
        # what its folder held before the first read, as ``files_in`` returns it
        inflight_files: frozenset[tuple[Any, ...]]

    class PatchedLoRAAdapter(LoRAAdapter):
        config: PatchedLoRAConfig


# No adapter's strength is near float16's largest number. Activations beyond it soon overflow, and
# NaN in the logits ends the scheduler.
LARGEST = torch.finfo(torch.float16).max
_FILES = (".json", ".safetensors", ".bin", ".pt")
# how an adapter was trained, initialized or found; none changes what its tensors compute
_OF_TRAINING = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
        "velora_config",
    }
)
# checked below, or against the adapter's tensors
_CHECKED = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    }
)
# PEFT subtracts the initial adapter from the base's weights
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@hook("sglang.srt.lora.lora_config.LoRAConfig.__init__", AROUND)
def read_config(
    read: Callable[..., None], config: PatchedLoRAConfig, *args: Any, **kwargs: Any
) -> None:
    """Read an adapter's configuration. Raise ``ValueError`` if SGLang would ignore a part of it."""
    path = args[0] if args else kwargs.get("path")
    # before the first read, for ``read_weights``
    config.inflight_files = files_in(path)
    try:
        read(config, *args, **kwargs)
    except TypeError as error:
        raise ValueError(f"adapter_config.json is no object: {error}") from error
    except KeyError as missing:
        raise ValueError(f"adapter_config.json has no field {missing}") from missing
    except json.JSONDecodeError as error:
        raise ValueError(f"adapter_config.json is no JSON: {error}") from error
    refuse_fields(config.hf_config)


@hook(f"{LORA}.__init__", AFTER)
def scale(_: None, adapter: LoRAAdapter, *args: Any, **kwargs: Any) -> None:
    """Honour ``use_rslora``: SGLang always divides by the rank."""
    adapter.scaling = scaling_of(adapter.config.hf_config)


def files_in(path: str | None) -> frozenset[tuple[Any, ...]]:
    """Return what identifies the contents of the adapter's files; nothing for no folder."""
    if path is None or not os.path.isdir(path):
        return frozenset()
    with os.scandir(path) as entries:
        stats = [(each.name, each.stat()) for each in entries if each.name.endswith(_FILES)]
    return frozenset((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats)


def refuse_fields(config: dict[str, Any]) -> None:
    """Raise ``ValueError``, with the field's name, unless each field is honoured."""
    kind, rank = config.get("peft_type"), config["r"]
    if not isinstance(kind, str) or kind.lower() != "lora":
        raise _refused(config, "peft_type", "SGLang serves LORA alone")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise _refused(config, "r", "it is no rank")
    if not _is_number(config["lora_alpha"]):
        raise _refused(config, "lora_alpha", "it is no finite number")
    if config.get("use_rslora") not in (None, True, False):
        raise _refused(config, "use_rslora", "it is neither true nor false")
    if not abs(scaling_of(config)) <= LARGEST:
        raise _refused(config, "lora_alpha", f"it scales beyond {LARGEST:g}")
    targets = config["target_modules"]
    if not isinstance(targets, str) and not _are_all(targets, str):
        raise _refused(config, "target_modules", "it lists no modules")
    for field, usual in (("alpha_pattern", "lora_alpha"), ("rank_pattern", "r")):
        pattern = config.get(field) or {}
        if not isinstance(pattern, dict) or any(each != config[usual] for each in pattern.values()):
            raise _refused(config, field, f"SGLang has one {usual} for all modules")
    if config.get("bias") not in (None, "none", False):
        raise _refused(config, "bias", "SGLang adds no biases")
    if str(config.get("init_lora_weights")).startswith(_CHANGES_BASE):
        raise _refused(
            config,
            "init_lora_weights",
            "it changes the base's weights: convert the adapter, or set true if they are served",
        )
    layers_of(config)
    if layers_of(config) is not None and config.get("layers_pattern") not in _LAYERS:
        raise _refused(config, "layers_pattern", "SGLang knows layers by 'layers'")
    for field, value in config.items():
        if value and field not in _OF_TRAINING | _CHECKED:
            raise _refused(config, field, "SGLang does not honour it")


_LAYERS: tuple[Any, ...] = (None, "", [], "layers", ["layers"])


def scaling_of(config: dict[str, Any]) -> float:
    """Return the factor of the adapter's product, as PEFT computes it."""
    rank: float = config["r"]
    alpha: float = config["lora_alpha"]
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def layers_of(config: dict[str, Any]) -> frozenset[int] | None:
    """Return the layers that ``layers_to_transform`` lists; None for all layers."""
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return None
    listed = [layers] if isinstance(layers, int) else layers
    if not _are_all(listed, int):
        raise _refused(config, "layers_to_transform", "it lists no layers")
    return frozenset(listed)


def excludes(config: dict[str, Any], module: str) -> bool:
    """Return whether ``exclude_modules`` names ``module``, a path in the base model."""
    excluded = config.get("exclude_modules") or ()
    if isinstance(excluded, str):
        return re.fullmatch(excluded, module) is not None
    return any(module == each or module.endswith(f".{each}") for each in excluded)


def _refused(config: dict[str, Any], field: str, why: str) -> ValueError:
    return ValueError(
        f"adapter_config.json has {field}={shorten(repr(config.get(field)))}, and {why}"
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _are_all(values: Any, kind: type) -> bool:
    return isinstance(values, list | tuple | set | frozenset) and all(
        isinstance(each, kind) for each in values
    )

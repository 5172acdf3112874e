"""Recipes that an earlier server with the same model has found, in files of the cache folder.

A recalled recipe stands for a proof, so its name has all that a proof depends on: a checkpoint's
files, the structure of the model on one rank, the experts there, the kernels that finish it (card,
arguments and environment choose them), and the versions of all code that loads and finishes it. A
file that cannot be read or written costs the time of a proof, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import torch
from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
from torch import nn

from sglang_inflight.cache import default_cache, keep, read_kept
from sglang_inflight.scheduler.update.finished.places import numbers_of, tensors_of
from sglang_inflight.scheduler.update.finished.recipe import Recipe, describe_layout

# counted up when a recipe says something else, or is found by other rules
_FORMAT = 5
_CODE = ("sglang", "sglang-inflight", "torch", "transformers")
# libraries whose kernels finish weights
_KERNELS = (
    "amd-aiter",
    "compressed-tensors",
    "flashinfer-python",
    "humming-kernels",
    "kernels",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "sgl-deep-gemm",
    "sglang-kernel",
    "tilelang",
    "triton",
)
# words in the names of arguments that choose a layer's method, its kernels, or its numbers
_OF_FINISHING = (
    "backend",
    "deterministic",
    "dtype",
    "expert",
    "fp32",
    "fp4",
    "fp8",
    "fus",
    "gemm",
    "kernel",
    "moe",
    "on_policy",
    "override",
    "precision",
    "quant",
    "tf32",
)
_VARIABLES = ("SGLANG_", "SGL_", "FLASHINFER_", "DG_", "TRITON_")


def name_recipe(
    checkpoint: Path,
    pristine: nn.Module,
    live: nn.Module,
    place: tuple[str, ...],
    layout: Mapping[str, str],
    server_args: Any,
) -> str:
    """Return the name under which the recipe of ``live`` is remembered.

    ``checkpoint``: the folder of the served checkpoint. ``pristine``: the model before loading.
    ``place``: the model's role and rank; ranks of one structure may have different experts.
    ``layout``: this rank's, see ``layout.py``. Raise ``OSError`` if the folder cannot be
    read.
    """
    files = [(file.name, file.stat()) for file in sorted(checkpoint.iterdir())]
    known = {
        "format": _FORMAT,
        "checkpoint": [str(checkpoint.resolve())]
        + [[name, stat.st_size, stat.st_mtime_ns] for name, stat in files],
        "code": [_version(package) for package in (*_CODE, *_KERNELS)],
        "environment": sorted(
            (name, value) for name, value in os.environ.items() if name.startswith(_VARIABLES)
        ),
        "layout": sorted(layout.items()),
        "arguments": _arguments_of_finishing(server_args),
        "models": [_describe(pristine), _describe(live)],
        "place": place,
        "experts": _describe_experts(),
        "device": str(next(live.parameters()).device.type),
        "threads": torch.get_num_threads(),
    }
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _arguments_of_finishing(server_args: Any) -> list[tuple[str, str]]:
    """Return the names and values of all arguments that may choose how weights are finished."""
    return [
        (name, str(getattr(server_args, name)))
        for name in sorted(server_args.__struct_fields__)
        if any(word in name for word in _OF_FINISHING)
    ]


def _describe_experts() -> str | None:
    """Return a digest of which experts lie where: a file may say so (``--init-expert-location``).

    Shapes do not show it, and the file may have changed under its name.
    """
    found = get_global_expert_location_metadata()
    if found is None:
        return None
    return hashlib.sha256(found.physical_to_logical_map_cpu.numpy().tobytes()).hexdigest()


def _describe(model: nn.Module) -> list[list[str]]:
    tensors = [[str(place), describe_layout(t)] for place, t in tensors_of(model).items()]
    kinds = [[path, type(module).__qualname__] for path, module in model.named_modules()]
    return [*tensors, *kinds, *([str(place)] for place in numbers_of(model))]


def recall(name: str) -> Recipe | None:
    """Return the recipe of this name, or None if there is none."""
    return read_kept(_file(name), "recipe", msgspec.json.Decoder(Recipe).decode)


def remember(name: str, recipe: Recipe) -> None:
    """Keep ``recipe`` under ``name``, whole or not at all."""
    keep(_file(name), msgspec.json.encode(recipe), "recipe")


def _file(name: str) -> Path:
    return default_cache() / "recipes" / f"{name}.json"

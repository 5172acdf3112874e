"""A row without forwards: SGLang loads the model in this process, and no server starts.

All tensors within a module's reach are compared, also those that SGLang derives from weights.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import get_model_loader
from torch import nn

from sglang_inflight.scheduler.update.checks.stageable import why_not_loaded, why_not_shadowed
from sglang_inflight.scheduler.update.finished.pristine import construct
from sglang_inflight.scheduler.update.finished.proof import find_recipe
from sglang_inflight.scheduler.update.finished.recipe import Recipe
from sglang_inflight.scheduler.update.forward_caches import ForwardCaches
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.shadow import fuse_scales
from sglang_inflight.vocabulary.errors import Refused, Unproven
from tests.families import named, tiny
from tests.families.families import Family
from tests.families.result import IN_PLACE, NOT_BUILT, REFUSED, STAGED, WRONG, Result, named_error
from tests.support.rank import Rank

Tensors = dict[str, torch.Tensor]
# the last of the folders
_NEARBY = tiny.VERSIONS


def compare(family: Family, folder: Path) -> Result:
    """Update a loaded model to the other checkpoints and back, in each form of staging."""
    folders = [*(folder / f"v{version}" for version in range(tiny.VERSIONS)), folder / tiny.NEARBY]
    with torch.no_grad():
        try:
            model, config = _load(folders[0], family)
            others = [_load(other, family)[0] for other in folders[1:]]
        except Exception as error:
            return Result(NOT_BUILT, f"SGLang does not load it on a CPU: {named_error(error)}")
        expected = [_tensors_of(model), *map(_tensors_of, others)]
        why_not, finishing = why_not_shadowed(model), None
        if why_not is not None:
            try:
                finishing = _finishing(model, config, tiny.read(folders[0]))
            except Unproven as unproven:
                why_not = f"{why_not}; {unproven}"
                if (never := why_not_loaded(model)) is not None:
                    return Result(REFUSED, never)
        is_staged = why_not is None or finishing is not None
        modes = [StagingMode.DEVICE, StagingMode.CHANGES] if is_staged else [StagingMode.OFF]
        for mode in modes:
            rank = Rank(
                mode,
                model,
                checkpoint_shapes={n: tensor.shape for n, tensor in tiny.read(folders[0]).items()},
                ties_head=_ties_head(config),
            )
            if finishing is not None:
                rank.shadowed._pristine, rank.shadowed._recipe = finishing
            for version in (1, 0, _NEARBY, 0):
                try:
                    rank.update(tiny.read(folders[version]))
                except Refused as refusal:
                    return Result(REFUSED, str(refusal))
                if different := _different(_tensors_of(model), expected[version]):
                    return Result(WRONG, f"{mode.name.lower()}: other tensors: {different}")
            if mode is not StagingMode.OFF:
                is_taken = _update_sparse(rank, *map(tiny.read, (folders[0], folders[_NEARBY])))
                wanted = expected[_NEARBY if is_taken else 0]
                if different := _different(_tensors_of(model), wanted):
                    how = f"{mode.name.lower()}, sparse"
                    return Result(WRONG, f"{how}: other tensors: {different}")
                rank.update(tiny.read(folders[0]))
        return Result(STAGED) if is_staged else Result(IN_PLACE, why_not or "")


def _update_sparse(rank: Rank, before: Tensors, after: Tensors) -> bool:
    """Send the elements that differ. Return whether the rank takes them: some classes refuse."""
    sent: Tensors = {}
    for name, tensor in after.items():
        if not tiny.is_taken_sparse(tensor):
            continue
        at = (tensor != before[name]).view(-1).nonzero().view(-1)
        sent |= {f"{name}.indices": at, f"{name}.values": tensor.view(-1)[at]}
    try:
        rank.update(sent, partial=True, load_format="sparse")
    except Refused:
        return False
    return True


def _finishing(model: nn.Module, config: ModelConfig, start: Tensors) -> tuple[nn.Module, Recipe]:
    """Return the model before loading, and its recipe. Raise ``Unproven`` if it has none."""
    runner: Any = SimpleNamespace(model=model, model_config=config, load_config=LoadConfig())
    torch.manual_seed(0)
    pristine = construct(runner)
    loaded = ForwardCaches(model).memory_after_loading()
    limit = UNPACED
    return pristine, find_recipe(
        pristine, model, torch.device("cpu"), start.items(), limit, 1 << 40, loaded
    )


def _load(folder: Path, family: Family) -> tuple[nn.Module, ModelConfig]:
    config = named.config_of(folder, family)
    # weights that no checkpoint brings have to be alike
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    loader = get_model_loader(LoadConfig(), config)
    model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu", 0))
    torch.use_deterministic_algorithms(False)
    fuse_scales(model)
    return model, config


def _ties_head(config: ModelConfig) -> bool:
    parts: tuple[Any, ...] = (config.hf_config, config.hf_text_config)
    return any(getattr(part, "tie_word_embeddings", False) for part in parts)


def _tensors_of(model: nn.Module) -> Tensors:
    """Return copies of all tensors that a forward may read."""
    found: Tensors = {}
    for name, module in model.named_modules():
        for attribute, value in {**vars(module), **module._parameters, **module._buffers}.items():
            for number, tensor in enumerate(value if isinstance(value, list | tuple) else [value]):
                if isinstance(tensor, torch.Tensor):
                    found[f"{name}.{attribute}.{number}"] = tensor.detach().clone()
    return found


def _different(ours: Tensors, theirs: Tensors) -> str:
    names = [name for name in theirs if name not in ours or not _equal(ours[name], theirs[name])]
    return ", ".join(names[:4])


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bit for bit: NaN equals NaN, and zero no negative zero."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return torch.equal(*bits)

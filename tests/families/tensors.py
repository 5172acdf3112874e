"""A row without forwards: SGLang loads the model in this process, and no server starts.

All tensors within a module's reach are compared, also those that SGLang derives from weights.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import get_model_loader
from torch import nn

from sglang_inflight.scheduler.forward_caches.caches import ForwardCaches
from sglang_inflight.scheduler.plans.audit import Differs
from sglang_inflight.scheduler.plans.finding import find_plan
from sglang_inflight.scheduler.plans.plan import Plan
from sglang_inflight.scheduler.plans.record import Kind
from sglang_inflight.scheduler.update.checks.stageable import why_not_loaded, why_not_shadowed
from sglang_inflight.scheduler.update.finished.plannable import leave_torn, plannable
from sglang_inflight.scheduler.update.finished.pristine import construct
from sglang_inflight.scheduler.update.finished.proof import find_recipe
from sglang_inflight.scheduler.update.finished.recipe import Recipe
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.shadow import fuse_scales, weights_of
from sglang_inflight.vocabulary.errors import Refused, Unproven
from tests.families import named, tiny
from tests.families.families import Family
from tests.families.result import (
    IN_PLACE,
    NOT_BUILT,
    REFUSED,
    STAGED,
    WRONG,
    Counts,
    Result,
    named_error,
)
from tests.support.rank import Rank

Tensors = dict[str, torch.Tensor]
# each but the first version, and the first one after each
_ORDER = (1, 0, *(at for near in range(len(tiny.NEARBY)) for at in (tiny.VERSIONS + near, 0)))


def compare(family: Family, folder: Path) -> Result:
    """Update a loaded model to the other checkpoints and back, in each form of staging.

    Each form gets them twice: by the plan of the model, and by the model's loader alone.
    """
    folders = [folder / name for name in tiny.FOLDERS]
    with torch.no_grad():
        try:
            model, config = load(folders[0], family)
            others = [load(other, family)[0] for other in folders[1:]]
        except Exception as error:
            return Result(NOT_BUILT, f"SGLang does not load it on a CPU: {named_error(error)}")
        expected = [tensors_of(model), *map(tensors_of, others)]
        if any(not differences(expected[0], other) for other in expected[1:]):
            return Result(NOT_BUILT, "SGLang loads nothing of its checkpoint")
        why_not, finishing = why_not_shadowed(model), None
        if why_not is not None:
            try:
                finishing = find_finishing(model, config, tiny.read(folders[0]))
            except Unproven as unproven:
                why_not = f"{why_not}; {unproven}"
                if (never := why_not_loaded(model)) is not None:
                    return Result(REFUSED, never)
        is_staged = why_not is None or finishing is not None
        counts: Counts | None = None
        tried: list[tuple[StagingMode, Plan | None]] = [(StagingMode.OFF, None)]
        if is_staged:
            plan = plan_of(model, finishing, tiny.read(folders[0]))
            counts = Counts.of(plan.ways(finishes=finishing is not None))
            modes = [StagingMode.DEVICE, StagingMode.CHANGES]
            tried = [*itertools.product(modes, (None, plan))]
        refused: dict[bool, str] = {}
        for mode, by_plan in tried:
            rank = Rank(
                mode,
                model,
                checkpoint_shapes={n: tensor.shape for n, tensor in tiny.read(folders[0]).items()},
                ties_head=ties_head(config),
            )
            if finishing is not None:
                rank.shadowed.findings.pristine, rank.shadowed.findings.recipe = finishing
            rank.shadowed.findings.plan = by_plan
            how = mode.name.lower() + ("" if by_plan is None else ", by the plan")
            try:
                _update_each(rank, folders, expected, sparse=mode is not StagingMode.OFF)
            except Differs as difference:
                return Result(WRONG, f"{how}: {difference}")
            except Refused as refusal:
                refused[by_plan is not None] = str(refusal)
                if different := differences(tensors_of(model), expected[0]):
                    return Result(WRONG, f"{how}, refused: other tensors: {different}")
            except _Wrong as wrong:
                return Result(WRONG, f"{how}{wrong}")
        if not is_staged:
            return Result(REFUSED, refused[False]) if refused else Result(IN_PLACE, why_not or "")
        if True in refused:
            return Result(REFUSED, refused[True], counts)
        alone = f"by its loader alone, refused: {refused[False]}" if refused else ""
        return Result(STAGED, alone, counts)


class _Wrong(Exception):
    """Tensors differ after an update."""


def _update_each(rank: Rank, folders: list[Path], expected: list[Tensors], *, sparse: bool) -> None:
    """Update to each checkpoint and back. Raise ``_Wrong`` with tensors that differ."""
    for version in _ORDER:
        rank.update(tiny.read(folders[version]))
        _expect(rank, expected[version], "")
    if not sparse:
        return
    for version in range(tiny.VERSIONS, len(folders)):
        is_taken = _update_sparse(rank, *map(tiny.read, (folders[0], folders[version])))
        _expect(rank, expected[version if is_taken else 0], ", sparse")
        rank.update(tiny.read(folders[0]))


def _expect(rank: Rank, expected: Tensors, how: str) -> None:
    if different := differences(tensors_of(rank.model), expected):
        raise _Wrong(f"{how}: other tensors: {different}")


def plan_of(model: nn.Module, finishing: tuple[nn.Module, Recipe] | None, start: Tensors) -> Plan:
    """Return the plan that a server of ``model`` would find, proven by the checkpoint ``start``."""
    restrict: Callable[[Plan], None]
    if finishing is None:
        raw, weights, restrict = model, dict(weights_of(model)), _leave_nothing
    else:
        raw, recipe = finishing
        weights = plannable(model, recipe)
        restrict = functools.partial(leave_torn, recipe=recipe, live=model, weights=weights)
    return find_plan(
        raw,
        weights,
        {name: Kind(tuple(tensor.shape), tensor.dtype) for name, tensor in start.items()},
        None,
        lambda: True,
        lambda needed: ((name, tensor) for name, tensor in start.items() if name in needed),
        _do_nothing,
        UNPACED,
        restrict=restrict,
    )


def _leave_nothing(plan: Plan) -> None:
    pass


def _do_nothing() -> None:
    pass


def _update_sparse(rank: Rank, before: Tensors, after: Tensors) -> bool:
    """Send the elements that differ. Return whether the rank takes them: some classes refuse."""
    sent: Tensors = {}
    for name, tensor in after.items():
        if not tiny.is_taken_sparse(tensor):
            continue
        at = (tensor != before[name]).view(-1).nonzero().view(-1)
        sent |= {f"{name}.indices": at, f"{name}.values": tensor.view(-1)[at]}
    try:
        rank.update_sparse(sent, after)
    except Refused:
        return False
    return True


def find_finishing(
    model: nn.Module, config: ModelConfig, start: Tensors
) -> tuple[nn.Module, Recipe]:
    """Return the model before loading, and its recipe. Raise ``Unproven`` if it has none."""
    runner: Any = SimpleNamespace(model=model, model_config=config, load_config=LoadConfig())
    torch.manual_seed(0)
    pristine = construct(runner)
    loaded = ForwardCaches(model).memory_after_loading()
    limit = UNPACED
    return pristine, find_recipe(
        pristine, model, torch.device("cpu"), start.items(), limit, 1 << 40, loaded
    )


def load(folder: Path, family: Family) -> tuple[nn.Module, ModelConfig]:
    config = named.config_of(folder, family)
    # weights that no checkpoint brings have to be alike
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    loader = get_model_loader(LoadConfig(), config)
    model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu", 0))
    torch.use_deterministic_algorithms(False)
    fuse_scales(model)
    return model, config


def ties_head(config: ModelConfig) -> bool:
    parts: tuple[Any, ...] = (config.hf_config, config.hf_text_config)
    return any(getattr(part, "tie_word_embeddings", False) for part in parts)


def tensors_of(model: nn.Module) -> Tensors:
    """Return copies of all tensors that a forward may read."""
    found: Tensors = {}
    for name, module in model.named_modules():
        for attribute, value in {**vars(module), **module._parameters, **module._buffers}.items():
            for number, tensor in enumerate(value if isinstance(value, list | tuple) else [value]):
                if isinstance(tensor, torch.Tensor):
                    found[f"{name}.{attribute}.{number}"] = tensor.detach().clone()
    return found


def differences(ours: Tensors, theirs: Tensors) -> str:
    names = [name for name in theirs if name not in ours or not _equal(ours[name], theirs[name])]
    return ", ".join(names[:4])


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bit for bit: NaN equals NaN, and zero no negative zero."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return torch.equal(*bits)

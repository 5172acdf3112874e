"""Loads weights that another server has saved or offers, without a loader and without finishing.

Into a shadow each tensor goes as it comes, and the seal compares the digest of the whole. Weights
written in place are read twice: once to prove that they are whole and unaltered, before the first
write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from sglang_inflight.extensions.saves.folder import open_saved
from sglang_inflight.extensions.saves.manifest import name_of_rank
from sglang_inflight.extensions.saves.pulling import open_pulled
from sglang_inflight.extensions.saves.served_part import ServedPart
from sglang_inflight.extensions.saves.tensors import parse_number
from sglang_inflight.messages import SERVED_ELSEWHERE, SavedFolderSource, ServedSource
from sglang_inflight.scheduler.update.checks.coverage import can_mark, is_finite, marks_in
from sglang_inflight.scheduler.update.checks.stageable import why_not_shadowed
from sglang_inflight.scheduler.update.finished.places import Number
from sglang_inflight.scheduler.update.jobs import WHOLE_LOADERS
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel
from sglang_inflight.scheduler.update.weight import Weight
from sglang_inflight.scheduler.update.whole_loader import Loaded
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.tensor_digest import Digest
from sglang_inflight.vocabulary.errors import Refused, shorten


@WHOLE_LOADERS.join()
def load_saved(
    source: ServedSource,
    models: Sequence[ShadowedModel],
    weights: Iterable[tuple[ShadowedModel, Weight]],
    layout: Mapping[str, str],
    *,
    in_place: bool,
    check_finite: bool,
    count: Callable[[torch.Tensor], None],
    check: Callable[[], None],
    rate_limit: RateLimit,
) -> Loaded:
    """Stage the tensors of ``source``, or write them in place. Raises ``Refused``.

    ``weights``: all of ``models``, in the digest's order. ``check_finite`` refuses NaN and
    infinity. ``count`` gets each tensor.
    """
    by_name = {f"{model.role}.{weight.name}": (model, weight) for model, weight in weights}
    parallel = get_parallel()
    rank = name_of_rank(parallel.pp_rank, parallel.tp_rank)
    tensors = nbytes = 0
    if in_place:
        _refuse_finished(models)
    with _open(source, rank, check) as part:
        part.require(layout, {name: weight.live for name, (_, weight) in by_name.items()})
        numbers = _numbers_of(models, part.numbers)

        def check_values(name: str, tensor: torch.Tensor) -> None:
            if check_finite:
                _refuse_not_finite(name, by_name[name][1].live.data, tensor, rate_limit)

        if in_place:
            _require_digest(part, by_name, check_values, rate_limit, check)
        for name, tensor, _ in part.read(rate_limit, check):
            model, weight = by_name[name]
            if not in_place:
                check_values(name, tensor)
            model.take_saved(weight, _laid_out_as(weight.live, tensor))
            count(tensor)
            tensors += 1
            nbytes += tensor.nbytes
        for model in models:
            model.take_saved_numbers(numbers[model.role])
        return Loaded(part.version, part.digest, tensors, nbytes)


def _open(
    source: ServedSource, rank: str, check: Callable[[], None]
) -> AbstractContextManager[ServedPart]:
    if isinstance(source, SavedFolderSource):
        return open_saved(source, rank, check)
    return open_pulled(source, rank, check)


def _refuse_finished(models: Sequence[ShadowedModel]) -> None:
    for model in models:
        if why_not_shadowed(model.runner.model) is not None:
            raise Refused(
                f"{SERVED_ELSEWHERE}: SGLang finishes the {model.role} model after loading, and "
                "this update is written in place, by SGLang's own steps: send a checkpoint"
            )


def _require_digest(
    part: ServedPart,
    names: Iterable[str],
    check_values: Callable[[str, torch.Tensor], None],
    rate_limit: RateLimit,
    check: Callable[[], None],
) -> None:
    """Raise ``Refused`` unless all tensors together have the rank's digest, in this order.

    ``check_values`` gets each tensor.
    """
    lines = {}
    for name, tensor, line in part.read(rate_limit, check):
        check_values(name, tensor)
        lines[name] = line
    digest = Digest()
    for name in names:
        digest.add(lines[name])
    if digest.hexdigest() != part.digest:
        raise Refused(
            f"its tensors have the digest {digest.hexdigest()}, and {part.digest} was saved"
        )


def _refuse_not_finite(
    name: str, live: torch.Tensor, tensor: torch.Tensor, rate_limit: RateLimit
) -> None:
    """Raise ``Refused`` if ``tensor`` holds NaN or infinity where ``live`` holds a number.

    Some models serve infinity by themselves, in a mask or in a constant.
    """
    if not can_mark(tensor):
        return
    for here, new in rate_limit.cut(live, tensor):
        if is_finite(new):
            continue
        here = here.to(new.device)
        # a mark stands for a number that is not there yet
        if ((here.isfinite() | marks_in(here)) & ~new.isfinite()).any():
            raise Refused(f"{shorten(name)!r} holds NaN or infinity")


def _numbers_of(
    models: Sequence[ShadowedModel], written: Mapping[str, str]
) -> dict[str, dict[str, Number]]:
    """Return the numbers that finishing has made, by role and by place."""
    found: dict[str, dict[str, Number]] = {model.role: {} for model in models}
    for name, text in written.items():
        role, _, place = name.partition(".")
        try:
            found[role][place] = parse_number(text)
        except (KeyError, ValueError):
            raise Refused(
                f"{shorten(name)!r} is {shorten(text)!r}, and no number of this server's models"
            ) from None
    return found


def _laid_out_as(weight: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with the strides of ``weight``."""
    if tensor.stride() == weight.stride():
        return tensor
    laid_out = torch.empty_strided(weight.shape, weight.stride(), dtype=tensor.dtype)
    return laid_out.copy_(tensor)

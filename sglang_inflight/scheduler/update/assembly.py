"""Builds the parts of phase one for a scheduler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.metrics import Metrics
from sglang_inflight.scheduler.update.changes.recording import Budget
from sglang_inflight.scheduler.update.jobs import Jobs
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.mode import StagingMode, choose_mode
from sglang_inflight.scheduler.update.rate import RateLimit, choose_rate
from sglang_inflight.scheduler.update.reservation import Reservation, tensors_copied_by_shadow
from sglang_inflight.scheduler.update.shadow import ShadowParameters, fuse_scales
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel, why_not_updated
from sglang_inflight.scheduler.update.shadows import Shadows
from sglang_inflight.scheduler.update.sources.broadcast import post_ahead
from sglang_inflight.scheduler.update.sources.groups import Groups
from sglang_inflight.scheduler.update.staging import Staging
from sglang_inflight.scheduler.update.worker import (
    InlineWorker,
    StagingWorker,
    streams_of,
)
from sglang_inflight.settings import Settings
from sglang_inflight.sglang_types.runtime_context import get_parallel
from sglang_inflight.unsupported import why_no_retraction, why_no_update

if TYPE_CHECKING:
    from sglang_inflight.scheduler.update.reservation import ReservingScheduler


def make_staging(
    scheduler: ReservingScheduler,
    boundary: Boundary,
    live: LiveWeights,
    answers: AnswerChannel,
    metrics: Metrics,
    settings: Settings,
    *,
    is_busy: Callable[[], bool],
) -> Staging:
    """Build ``Staging`` on the scheduler's thread, before the staging thread's first job.

    ``is_busy`` says, to any thread, whether requests run.
    """
    reservation: Reservation | None = scheduler.inflight_reservation
    parameters = ShadowParameters(reservation.storage if reservation is not None else {})
    runners = scheduler.weight_updater._select_runners("all")
    models = [ShadowedModel(role, runner, parameters) for role, runner in runners]
    parameters.keep_reserved_for(tensors_copied_by_shadow(runner.model for _, runner in runners))
    for model in models:
        # SGLang does so at the first forward, and updates do it from then on
        fuse_scales(model.runner.model)
    device = next(models[0].runner.model.parameters()).device
    nbytes = sum(model.nbytes for model in models)
    why_not_staged = why_no_update(in_place=False) or why_not_updated(models, in_place=False)
    if reservation is not None:
        mode = reservation.mode
    else:
        mode = choose_mode(
            settings.staging,
            nbytes,
            device,
            why_not=why_not_staged,
        )
    worker: InlineWorker | StagingWorker
    # in place nothing decodes during an update, so nothing is paced
    if in_place := mode is StagingMode.OFF:
        worker = InlineWorker(answers, device, boundary.prepare_to_hold)
        rate_limit = RateLimit(0, is_busy)
        for model in models:
            model.on_write = functools.partial(live.write_in_place, [model.role])
    else:
        streams = functools.partial(streams_of, scheduler)
        worker = StagingWorker(answers, device, settings.stage_nice, streams)
        rate_limit = RateLimit(
            choose_rate(settings.pace_bytes_per_s, device), is_busy, settings.pace_interpreter
        )
    groups = Groups(settings.group_timeout_s, device)
    budget = Budget.of(nbytes, device, settings.changes_bytes, settings.window_bytes)
    jobs = Jobs(
        models,
        Shadows(models, parameters, rate_limit, budget),
        groups,
        metrics,
        mode=mode,
        device=device,
        rate_limit=rate_limit,
        check_finite=settings.check_finite,
    )
    return Staging(
        jobs,
        worker,
        groups,
        live,
        answers,
        mode=mode,
        expect_no_step=boundary.expect_no_step,
        post_ahead=lambda source: post_ahead(source, groups, device, worker.stream),
        refusal=_why_refused(models, in_place=in_place),
        why_not_staged=why_not_staged,
    )


def _why_refused(models: list[ShadowedModel], *, in_place: bool) -> str | None:
    """Return why this server takes no updates, or None if it does."""
    if (reason := why_no_update(in_place=in_place)) is not None:
        return reason
    if in_place and (reason := why_no_retraction()) is not None:
        return f"weights cannot be written in place, between two steps: {reason}"
    if in_place and get_parallel().pp_size > 1:
        # a stage with a job would make no step, and the other stages would wait for it
        return "weights cannot be written in place, between two steps, with --pp-size above 1"
    return why_not_updated(models, in_place=in_place)

"""Builds the parts of phase one for a scheduler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec
import torch

from sglang_inflight.capabilities import flag_that_moves_experts
from sglang_inflight.metrics import Metrics
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.collectives import is_true_on_any_rank
from sglang_inflight.scheduler.groups.groups import Groups
from sglang_inflight.scheduler.update import cost
from sglang_inflight.scheduler.update.changes.recording import Budget
from sglang_inflight.scheduler.update.checks.stageable import device_of
from sglang_inflight.scheduler.update.jobs import Jobs
from sglang_inflight.scheduler.update.layout import find_layout
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.mode import StagingMode, choose_mode
from sglang_inflight.scheduler.update.rate import UNPACED, RateLimit, choose_rate
from sglang_inflight.scheduler.update.reservation import Reservation, weights_with_copies
from sglang_inflight.scheduler.update.shadow import fuse_scales
from sglang_inflight.scheduler.update.shadowed_model import ShadowedModel, why_not_updated
from sglang_inflight.scheduler.update.shadows import Shadows
from sglang_inflight.scheduler.update.sources.broadcast import post_ahead
from sglang_inflight.scheduler.update.staging import Staging
from sglang_inflight.scheduler.update.worker import (
    InlineWorker,
    StagingWorker,
    streams_of,
)
from sglang_inflight.settings import Settings
from sglang_inflight.sglang_types import get_model
from sglang_inflight.vocabulary.answers import Capabilities
from sglang_inflight.vocabulary.errors import Unproven

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_inflight.scheduler.update.reservation import ReservingScheduler
    from sglang_inflight.sglang_types import ServerArgs


class Parts(NamedTuple):
    """The parts of phase one. ``layout`` is this rank's, see ``layout.py``.

    ``rate_limit`` paces a thread beside requests, also where updates are not paced.
    ``make_thread`` starts a thread of that name beside the staging thread.
    """

    staging: Staging
    models: list[ShadowedModel]
    device: torch.device
    layout: dict[str, str]
    rate_limit: RateLimit
    make_thread: Callable[[str, RateLimit], StagingWorker]


def make_staging(
    scheduler: ReservingScheduler,
    boundary: Boundary,
    live: LiveWeights,
    answers: AnswerChannel,
    metrics: Metrics,
    settings: Settings,
    can: Capabilities,
    *,
    is_busy: Callable[[], bool],
) -> Parts:
    """Build the parts on the scheduler's thread, before the staging thread's first job.

    ``is_busy`` says, to any thread, whether requests run. ``can`` has the arguments' rows, and
    ``Staging.can`` the models' too.
    """
    reservation: Reservation | None = scheduler.inflight_reservation
    reserved = reservation or Reservation(StagingMode.OFF)
    runners: list[tuple[str, ModelRunner]] = scheduler.weight_updater._select_runners("all")
    moves = flag_that_moves_experts(cast("ServerArgs", scheduler.server_args)) is not None
    models = [
        ShadowedModel(
            role,
            runner,
            experts_move=moves,
            forward_caches=scheduler.inflight_forward_caches.get(id(runner.model)),
        )
        for role, runner in runners
    ]
    reserved.keep_for(weights_with_copies(runner.model for _, runner in runners))
    for model in models:
        # SGLang does so at the first forward, and updates do it from then on
        fuse_scales(model.runner.model)
        model.forward_caches.end_start(model.runner, holds_graphs=model.holds_graphs)
        if settings.staging != "off" and can.stage is None and not _is_written_over_rdma():
            model.findings.prepare_to_finish()
    device = device_of(models[0].runner.model)
    layout = find_layout(models, device, scheduler.server_args)
    if settings.proof == "start":
        can = _prove(models, device, layout, can)
    nbytes = sum(model.nbytes for model in models)
    can = msgspec.structs.replace(
        can,
        stage=can.stage or why_not_updated(models, in_place=False),
        in_place=can.in_place or why_not_updated(models, in_place=True),
    )
    # the models' finishing was not looked at before
    if reservation is not None and not is_true_on_any_rank(can.stage is not None):
        mode = reservation.mode
    else:
        mode = choose_mode(
            settings.staging,
            nbytes,
            device,
            why_not=can.stage,
        )
    if mode is StagingMode.OFF:
        reserved.keep_for(())
    kv_tokens = cost.kv_tokens_by_form(nbytes, device.type, cost.kv_token_bytes(scheduler))
    cost.log_cost(mode, kv_tokens, scheduler)
    worker: InlineWorker | StagingWorker
    paced = RateLimit(
        choose_rate(settings.pace_bytes_per_s, device), is_busy, settings.pace_interpreter
    )
    streams = functools.partial(streams_of, scheduler, [runner.model for _, runner in runners])
    # in place nothing decodes during an update, so nothing is paced
    if mode is StagingMode.OFF:
        worker = InlineWorker(answers, device, boundary.prepare_to_hold)
        rate_limit = UNPACED
        for model in models:
            model.on_write = functools.partial(live.write_in_place, [model.role])
    else:
        rate_limit = paced
        worker = StagingWorker(answers, device, settings.stage_nice, rate_limit, streams)
    live.attach(
        {model.role: model.forward_caches for model in models},
        free=lambda swap: worker.do(swap.free),
    )
    groups = Groups(settings.group_timeout_s, device)
    budget = Budget.of(nbytes, device, settings.changes_bytes, settings.window_bytes)
    jobs = Jobs(
        models,
        Shadows(
            models,
            reserved.storage_for,
            rate_limit,
            budget,
            check_finite=settings.check_finite,
        ),
        groups,
        metrics,
        mode=mode,
        device=device,
        rate_limit=rate_limit,
        check_finite=settings.check_finite,
        layout=layout,
    )

    def make_thread(name: str, rate_limit: RateLimit) -> StagingWorker:
        return StagingWorker(
            answers,
            device,
            settings.stage_nice,
            rate_limit,
            lambda: [*streams(), *([worker.stream] if worker.stream else [])],
            name=name,
        )

    staging = Staging(
        jobs,
        worker,
        groups,
        live,
        answers,
        mode=mode,
        kv_tokens=kv_tokens,
        expect_no_step=boundary.expect_no_step,
        prepare_to_hold=boundary.prepare_to_hold,
        post_ahead=lambda source: post_ahead(
            source, groups, jobs.reader.layouts, device, worker.stream
        ),
        can=can,
    )
    return Parts(staging, models, device, layout, paced, make_thread)


def _is_written_over_rdma() -> bool:
    """Return whether trainers may write the served weights themselves, in a session's course.

    A finished model must be restored before that, and finished after it.
    """
    written: bool = get_model().remote_instance_weight_loader_start_seed_via_transfer_engine
    return written


def _prove(
    models: list[ShadowedModel],
    device: torch.device,
    layout: dict[str, str],
    can: Capabilities,
) -> Capabilities:
    """Prove each model's finishing and plan now, and note in ``can`` what cannot be repeated.

    A reason that may pass leaves the proof to the first update.
    """
    for model in models:
        try:
            model.findings.prove(device, lambda: None, UNPACED, layout)
        except Unproven as unproven:
            if model.findings.may_be_proven_later:
                continue
            can = msgspec.structs.replace(can, stage=can.stage or f"{unproven}")
        if can.stage is None:
            model.read_checkpoint(lambda: None)
            model.findings.find_plan(device, lambda: None, UNPACED, layout)
    return can

"""Checks the preconditions of SGLang's handlers before they begin.

Without these checks a handler fails half way, with a part of its work done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.managers.io_struct import (
    BatchTokenizedGenerateReqInput,
    CheckWeightsReqInput,
    GetWeightsByNameReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    RpcReqInput,
    SendWeightsToRemoteInstanceReqInput,
    SlowDownReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.memory.release import MemoryRelease
from sglang_inflight.sglang_types import get_device
from sglang_inflight.vocabulary.errors import Conflict, Refused

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import BatchRequest, MemoryRequest, Scheduler

# Largest part of --watchdog-timeout that /slow_down may add to each step. The watchdog takes a
# step longer than its timeout for a hang.
SHARE_OF_WATCHDOG = 0.5
# These read weights: the RPC may save a model.
_READS_WEIGHTS = (
    CheckWeightsReqInput,
    GetWeightsByNameReqInput,
    RpcReqInput,
    SendWeightsToRemoteInstanceReqInput,
)


def check(
    request: Any, scheduler: Scheduler, boundary: Boundary, memory_release: MemoryRelease
) -> None:
    """Raise ``Refused``, or a subclass, before the handler of ``request`` changes anything."""
    if isinstance(request, _READS_WEIGHTS):
        memory_release.require_weights(type(request).__name__)
    elif isinstance(request, ReleaseMemoryOccupationReqInput):
        if twice := set(_tags(request)) & scheduler.weight_updater.offload_tags:
            raise Conflict(f"memory is released already: {', '.join(sorted(twice))}")
        _require_idle(scheduler, boundary)
    elif isinstance(request, ResumeMemoryOccupationReqInput):
        if held := set(_tags(request)) - scheduler.weight_updater.offload_tags:
            raise Conflict(f"memory was not released: {', '.join(sorted(held))}")
    elif isinstance(request, SlowDownReqInput):
        slower: SlowDownReqInput = request
        _may_sleep(slower.forward_sleep_time)
    elif isinstance(request, TokenizedGenerateReqInput):
        _may_process(request)
    elif isinstance(request, BatchTokenizedGenerateReqInput):
        batched: BatchRequest = request
        for each in batched.batch:
            _may_process(each)


def _require_idle(scheduler: Scheduler, boundary: Boundary) -> None:
    if not boundary.is_fully_idle(ignore_waiting=scheduler._engine_paused):
        running, waiting = len(boundary.requests.running()), len(boundary.requests.waiting())
        raise Conflict(
            f"memory cannot be released: {running} requests run and {waiting} wait. Let "
            'them end, or pause with mode "retract" or "abort"'
        )


def _tags(request: MemoryRequest) -> list[str]:
    """Return the kinds of memory named by ``request``. Without tags SGLang means all kinds."""
    known = list(GPU_MEMORY_ALL_TYPES)
    tags = list(request.tags or known)
    if unknown := set(tags) - set(known):
        raise Refused(
            f"unknown memory tags: {', '.join(sorted(unknown))}; there are {', '.join(known)}"
        )
    if len(set(tags)) < len(tags):
        raise Refused(f"a memory tag is named twice: {', '.join(tags)}")
    return tags


def _may_sleep(seconds: float | None) -> None:
    most = get_device().watchdog_timeout * SHARE_OF_WATCHDOG
    if seconds is not None and not seconds <= most:
        raise Refused(
            f"forward_sleep_time={seconds:g}: a step sleeps {most:g} s at most, or the watchdog "
            "ends the server (--watchdog-timeout)"
        )


def _may_process(request: Any) -> None:
    """Unpickle the request's logit processor here, and not in a step. SGLang caches it."""
    if not request.custom_logit_processor:
        return
    try:
        CustomLogitProcessor.from_str(request.custom_logit_processor)
    except Exception as error:
        raise Refused(f"custom_logit_processor cannot be made: {error}") from error

"""Says in a request's last output by which seed its tokens were sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_inflight.extensions.seeds import SAMPLING_SEED
from sglang_inflight.scheduler.outputs import OUTPUTS
from sglang_inflight.sglang_types import get_exec

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_inflight.scheduler.controller import Controller


@OUTPUTS.join(order=1)
def say_seeds(_: Controller, reqs: list[Req]) -> dict[str, list[Any]]:
    if not get_exec().deterministic.enable_deterministic_inference:
        return {}
    ended = (req.sampling_params if req.finished() else None for req in reqs)
    return {SAMPLING_SEED: [params and params.sampling_seed for params in ended]}

"""Restarts beam searches that are retracted, and keeps their ``custom_params``.

A retracted beam search begins anew, because its clients get no token before its end. SGLang's pause
frees the KV of the request, but not of the beam's other rows, because they have no request. The
rows are never freed and stay in the emptied batch, and the next use of that batch raises. Only the
scheduler's thread calls this, between two steps, with no forward in flight.

SGLang gives a beam search sampling parameters of its own, without ``custom_params``. There our
fields are, such as a version contract and the bound on KV's age.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from sglang.srt.beam_search.batch_tail import strip_beam_tail
from sglang.srt.beam_search.beam_group import BeamGroup

from sglang_inflight.hooking import AFTER, hook

if TYPE_CHECKING:
    from sglang.srt.beam_search.coordinator import BeamCoordinator
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_inflight.sglang_types import Scheduler


@hook("sglang.srt.beam_search.fork.neutral_member_sampling_params", AFTER)
def keep_custom_params(params: SamplingParams, leader_params: SamplingParams) -> None:
    params.custom_params = leader_params.custom_params


def begin_beams_anew(scheduler: Scheduler, running: Collection[Req]) -> None:
    """Restart the beam searches among ``running``, before all of these are retracted.

    SGLang appends the rows of other beam searches again at each step.
    """
    if all(req.beam_group is None for req in running):
        return
    for batch in scheduler._collect_inflight_batches():
        if batch is not None:
            strip_beam_tail(batch)
    # every rank takes the same order
    for req in sorted(running, key=lambda req: req.rid):
        if req.beam_group is not None:
            _restart(scheduler.beam_coordinator, req, req.beam_group)


def _restart(coordinator: BeamCoordinator, req: Any, old: BeamGroup) -> None:
    coordinator._free_member_rows(old)
    coordinator.retire_group(req)
    group: Any = BeamGroup(
        beam_width=old.beam_width,
        length_penalty=old.length_penalty,
        stop_token_ids=old.stop_token_ids.tolist(),
        max_new_tokens=old.max_new_tokens,
        num_return=old.num_return,
        device=old.stop_token_ids.device,
    )
    group.leader, group.prompt_len = req, len(req.origin_input_ids)
    req.beam_group = group
    coordinator._num_live_groups += 1
    # holds only a placeholder for each step
    req.output_ids = array("q")
    req.weight_version_events.clear()

"""A request that is aborted outside the output stream, where it has made tokens before.

SGLang tells the tokenizer of such an abort by a message of its own, which overtakes outputs that
the detokenizer still has, and carries neither tokens that were not sent nor the request's usage.
A retracted request waits in the queue with tokens that it has made, and so does one of which
memory pressure, a higher priority or a decode server's queue disposes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.output_streamer import SchedulerOutputStreamer
    from sglang_inflight.scheduler.sglang_types.req import Req
    from sglang_inflight.sglang_types.requests import AbortRequest

_MESSAGE = "Abort in waiting queue"


def has_made_something(req: Req) -> bool:
    """Beams are left out: what a group has made is told of at its end alone."""
    return bool(req.output_ids or req.retraction_count) and req.beam_group is None


def finish_with_output(streamer: SchedulerOutputStreamer, req: Req, abort: AbortRequest) -> None:
    """Finish ``req`` as a running request that is aborted, with all that it has.

    Every rank of a replica does so in the same step, as it sends outputs.
    """
    reason: dict[str, Any] = abort.finished_reason or {}
    req.finished_reason = FINISH_ABORT(
        reason.get("message") or abort.abort_message or _MESSAGE,
        reason.get("status_code"),
        reason.get("err_type"),
    )
    req.to_finish = None
    req.time_stats.set_completion_time()
    streamer.stream_output([req], req.return_logprob)

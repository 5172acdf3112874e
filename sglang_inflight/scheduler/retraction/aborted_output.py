"""Sends an aborted request's tokens, also when it is aborted outside the output stream.

SGLang sends the tokenizer an abort message for a queued request. The message overtakes outputs
still in the detokenizer, and carries neither unsent tokens nor usage. But a queued request may have
tokens: a retracted one, or one dropped for lack of memory, for a higher priority, or by a decode
server's queue.

This module hooks ``SenderWrapper.send_output``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import AbortReq as Abort
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.schedule_batch import Req as AnyRequest

from sglang_inflight.hooking import AROUND, SENDER, hook, with_us
from sglang_inflight.scheduler.controller import Controller

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

_MESSAGE = "Abort in waiting queue"


# the sender to the detokenizer has no controller
@hook(f"{SENDER}.send_output", AROUND, order=1, via="inflight", when=with_us)
def end_with_output(
    controller: Controller,
    send: Callable[..., None],
    output: Any,
    recv_obj: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """End an aborted request by its last output, if it has made tokens."""
    is_abort = isinstance(output, Abort) and isinstance(recv_obj, AnyRequest)
    streamer = controller.scheduler.output_streamer
    if is_abort and streamer.is_generation and has_made_something(recv_obj):
        finish_with_output(streamer, recv_obj, output)
    else:
        send(output, recv_obj, *args, **kwargs)


def has_made_something(req: Req) -> bool:
    """Return whether ``req`` has output to send. A beam group sends its output only at its end."""
    return bool(req.output_ids or req.retraction_count) and req.beam_group is None


def finish_with_output(streamer: SchedulerOutputStreamer, req: Req, abort: AbortReq) -> None:
    """Finish ``req`` like an aborted running request, with all its output.

    Every rank of a replica does so in the same step, because ranks send outputs together.
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

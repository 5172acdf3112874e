"""Puts a request into the state that it would have here, had it made its output here.

A request that goes on is to the scheduler what a retracted request is: it has output tokens, and
no KV. SGLang prefills prompt and output again, and samples the next token. So penalties, stop
strings, ``min_new_tokens``, seeds and texts are those of the whole output. A grammar is brought to
the output's end first. The first chunk of the answer has the whole output so far, and the answer
has its log probabilities and versions, as they were given.

All ranks of a replica get the same request, and do the same. Only the scheduler's thread runs this
module, when it puts the request into its queue, before any forward of the request.
"""

from __future__ import annotations

import weakref
from array import array
from concurrent.futures import Future
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

from sglang.srt.utils.weight_versions import WeightVersionEvent

from sglang_inflight.extensions.continued.so_far import Likely, OutputSoFar, read_so_far
from sglang_inflight.scheduler.controller import ENTRIES, PARTS, Controller
from sglang_inflight.vocabulary.contracts import custom_param
from sglang_inflight.vocabulary.so_far import OUTPUT_SO_FAR

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass
class Continued:
    """Requests that have their output, and some that have ended."""

    reqs: weakref.WeakSet[Req] = field(default_factory=weakref.WeakSet)


@PARTS.join()
def make_continued(_: Controller) -> Continued:
    return Continued()


# before the adapters' entry, which labels a request's first token with its adapter
@ENTRIES.join(order=-2)
def admit(controller: Controller, req: Req) -> None:
    """Give a request its output so far, once: a retracted request comes here again."""
    given = custom_param(req.sampling_params, OUTPUT_SO_FAR)
    reqs = controller.part(Continued).reqs
    most = req.sampling_params.max_new_tokens or 0
    # SGLang prefills a prompt with several samples by a copy of the request that makes no token
    is_warm_up = most == 0
    if given is None or req in reqs or req.finished() or req.to_finish is not None or is_warm_up:
        return
    reqs.add(req)
    so_far = read_so_far(given)
    if len(so_far.token_ids) >= most:
        req.set_finish_with_abort(
            f"custom_params.{OUTPUT_SO_FAR} has {len(so_far.token_ids)} tokens, and this server "
            f"has room for {most} behind the prompt",
            status_code=HTTPStatus.BAD_REQUEST,
        )
        return
    if not _follow_output(controller, req, so_far.token_ids):
        return
    req.output_ids = array(req.output_ids.typecode, so_far.token_ids)
    if req.return_logprob:
        _give_logprobs(req, so_far)
    _give_versions(controller, req, so_far)


def _give_logprobs(req: Req, so_far: OutputSoFar) -> None:
    logprob, tokens = req.logprob, so_far.token_ids
    logprob.output_token_logprobs_val = list(so_far.logprobs or ())
    logprob.output_token_logprobs_idx = list(tokens)
    if so_far.top_logprobs is not None and logprob.top_logprobs_num > 0:
        values, ids = _columns(so_far.top_logprobs)
        logprob.output_top_logprobs_val, logprob.output_top_logprobs_idx = values, ids
    if so_far.token_ids_logprobs is not None and logprob.token_ids_logprob is not None:
        values, ids = _columns(so_far.token_ids_logprobs)
        logprob.output_token_ids_logprobs_val = list(values)
        logprob.output_token_ids_logprobs_idx = ids
    # the prefill of the output so far has none to compute, and may use cached KV
    req.logprob_start_len = len(req.origin_input_ids) + len(tokens)


def _columns(rows: list[list[Likely]]) -> tuple[list[list[float]], list[list[int]]]:
    return (
        [[value for value, _ in row] for row in rows],
        [[token for _, token in row] for row in rows],
    )


def _give_versions(controller: Controller, req: Req, so_far: OutputSoFar) -> None:
    """Write the given spans where SGLang notes how many tokens each version has made."""
    spans = so_far.weight_versions
    req.weight_version_events += [
        WeightVersionEvent(old_version=span.label.pack(), num_output_tokens=span.end)
        for span in spans
    ]
    if so_far.adapter_versions:
        starts = [(span.label, span.start) for span in so_far.adapter_versions]
        controller.adapter_versions.begin_after(req, starts)


def _follow_output(controller: Controller, req: Req, tokens: list[int]) -> bool:
    """Bring the grammar and the count of reasoning tokens to the output's end.

    Returns False for an output that the grammar does not allow. The request then ends.
    """
    if req.grammar is not None:
        # a request is queued when its grammar is there
        assert not isinstance(req.grammar, Future)
        try:
            for token in tokens:
                req.grammar.accept_token(token)
        except ValueError as error:
            req.set_finish_with_abort(
                f"custom_params.{OUTPUT_SO_FAR} is not of this grammar: {error}",
                status_code=HTTPStatus.BAD_REQUEST,
            )
            return False
    for token in tokens:
        controller.scheduler.batch_result_processor._maybe_update_reasoning_tokens(req, token)
    return True

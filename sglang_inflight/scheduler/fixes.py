"""Mends SGLang where requests of in-flight updates meet its faults.

A retracted request goes on as if nothing had happened. SGLang forgets parts of it:

**Prefilled again**: SGLang would append the hidden states of the prompt and of all earlier tokens a
second time. For a request with ``input_embeds`` it would drop the earlier tokens, because it has
embeddings of the prompt only. But a stream may have sent some of these tokens.

**Penalties**: SGLang counts a request's tokens step by step, in tensors of its batch. In its next
batch a retracted request would start from zero: ``frequency_penalty``, ``presence_penalty`` and
``repetition_penalty`` would forget its tokens, and ``min_new_tokens`` more would have to come. The
hooks run where SGLang makes the tensors, on the scheduler's stream. A request without a retraction
has no tokens there, or its count changes nothing.

**Turns of a streaming session**: a session runs one turn at a time, from the KV of its last
finished turn. SGLang takes a retracted turn for a finished one, and a refused turn for the running
one. A second turn is then admitted, and the scheduler ends when both use the session's KV. Only the
scheduler's thread touches a session.

**Beam searches**: a retracted beam search begins anew, because its clients get no token before its
end. SGLang's pause frees the KV of the request, but not of the beam's other rows, because they have
no request. The rows are never freed and stay in the emptied batch, and the next use of that batch
raises. Only the scheduler's thread calls this, between two steps, with no forward in flight.

An aborted request's tokens are sent, also when it is aborted outside the output stream. SGLang
sends the tokenizer an abort message for a queued request. The message overtakes outputs still in
the detokenizer, and carries neither unsent tokens nor usage. But a queued request may have tokens:
a retracted one, or one dropped for lack of memory, for a higher priority, or by a decode server's
queue.

A request whose grammar allows no token ends alone, without its batch.

**Sampling masks**: SGLang computes the prompt of ``n`` samples first, by a request of no new
tokens. A batch of such requests samples nothing and has no masks, and SGLang ends a request without
its mask.

This module hooks ``Req``, ``Session``, ``StreamingSession``, ``ScheduleBatch``, ``ForwardBatch``,
SGLang's penalizers, ``SamplingBatchInfo`` and ``SchedulerBatchResultProcessor``.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from sglang.srt.beam_search.batch_tail import strip_beam_tail
from sglang.srt.beam_search.beam_group import BeamGroup
from sglang.srt.layers.logits_processor import SamplingMaskStatus
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_inflight.hooking import (
    AFTER,
    AROUND,
    PENALTIES,
    PROCESSOR,
    REQ,
    SAMPLING,
    SCHEDULER,
    hook,
)
from sglang_inflight.scheduler.requests import record_of
from sglang_inflight.sglang_types import get_parallel

if TYPE_CHECKING:
    import torch
    from sglang.srt.beam_search.coordinator import BeamCoordinator
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.penaltylib.frequency_penalty import BatchedFrequencyPenalizer
    from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer
    from sglang.srt.sampling.penaltylib.orchestrator import _BatchedPenalizer
    from sglang.srt.sampling.penaltylib.presence_penalty import BatchedPresencePenalizer
    from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.session.session_controller import Session
    from sglang.srt.session.streaming_session import SessionSlot, StreamingSession

    from sglang_inflight.sglang_types import Scheduler

Embed = Callable[[torch.Tensor], torch.Tensor]

_MESSAGE = "Abort in waiting queue"

# ---- prefilled again -------------------------------------------------------------------------


class TokenEmbeddings:
    """Flag: every model of this process exposes its token embedding.

    Set before the first request, on the scheduler's thread, and only read afterwards.
    """

    are_known = False


def look_for_embeddings(scheduler: Scheduler) -> None:
    workers = (scheduler.tp_worker, scheduler.draft_worker)
    runners = [r for w in workers if w is not None for _, r in w.weight_update_runners()]
    TokenEmbeddings.are_known = all(_embedding_of(r.model) is not None for r in runners)


@hook(f"{REQ}.reset_for_retract", AROUND)
def keep_output(reset: Callable[[Req], None], req: Req) -> None:
    """Keep the output of a request with ``input_embeds``, which SGLang's ``reset`` empties."""
    output_ids, events = req.output_ids, req.weight_version_events
    reset(req)
    if req.input_embeds is not None and TokenEmbeddings.are_known:
        req.output_ids, req.weight_version_events = output_ids, events


@hook("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", AFTER)
def embed_tokens(
    forward_batch: ForwardBatch,
    _: object,
    batch: ScheduleBatch,
    model_runner: ModelRunner,
    *args: object,
    **kwargs: object,
) -> None:
    """Add the embeddings of generated tokens to those that requests brought.

    ``input_embeds`` is float32, of shape (tokens with an embedding in their request, hidden size).
    Afterwards ``input_embeds`` has a row for each token of the batch. The embedding runs right
    before the forward, on its stream. So the ranks of a tensor-parallel group embed in the same
    order, and with the weights of the step.
    """
    given = forward_batch.input_embeds
    if given is None or not batch.forward_mode.is_extend():
        return
    places, tokens = _places(batch)
    if len(places) == tokens:
        return
    ids = forward_batch.input_ids
    whole = given.new_zeros(len(ids), given.shape[1])
    # later stages of a pipeline embed nothing
    if get_parallel().pp_rank == 0 and (embed := _embedding_of(model_runner.model)) is not None:
        whole.copy_(embed(ids))
    whole[torch.tensor(places, device=given.device)] = given[: len(places)]
    forward_batch.input_embeds = whole


def _places(batch: ScheduleBatch) -> tuple[list[int], int]:
    """Return the indices of tokens with an embedding in their request, and the token count."""
    places: list[int] = []
    start = 0
    for req, prefix, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        if req.input_embeds is not None:
            places += range(start, start + min(max(len(req.input_embeds) - prefix, 0), length))
        start += length
    return places, start


def _embedding_of(model: torch.nn.Module) -> Embed | None:
    get: Any = getattr(model, "get_input_embeddings", None)
    if get is not None:
        # in some of SGLang's models this method embeds, in others it returns the layer
        found = get if inspect.signature(get).parameters else get()
        return cast(Embed, found) if callable(found) else None
    layers = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    return layers[0] if len(layers) == 1 else None


@hook(f"{PROCESSOR}._append_prefill_hidden_states", AROUND)
def append_hidden_states(
    append: Callable[..., int],
    processor: object,
    *,
    req: Req,
    logits_output: Any,
    hidden_state_offset: int,
    extend_input_len: int,
    store: bool = True,
    **kwargs: Any,
) -> int:
    """Append one row, for the prefill's new token, if ``req`` has earlier tokens.

    ``hidden_states`` has a row (hidden size) for each token. The first token has a block instead
    (tokens of the prompt, hidden size).
    """
    continues = bool(req.output_ids)
    end = append(
        processor,
        req=req,
        logits_output=logits_output,
        hidden_state_offset=hidden_state_offset,
        extend_input_len=extend_input_len,
        store=store and not continues,
        **kwargs,
    )
    if store and continues and req.return_hidden_states:
        row = logits_output.hidden_states[end - 1].cpu().tolist()
        if req.return_hidden_states == "last":
            req.hidden_states[:] = [row]
        else:
            req.hidden_states.append(row)
    return end


# ---- queued again ----------------------------------------------------------------------------


@hook(f"{SCHEDULER}._abort_on_queued_limit", AROUND)
def keep_accepted(limit: Callable[..., bool], scheduler: Scheduler, recv_req: Req) -> bool:
    """Keep retracted requests in a full queue: they were accepted before."""
    return not recv_req.is_retracted and limit(scheduler, recv_req)


# ---- penalties -------------------------------------------------------------------------------


@hook(f"{PENALTIES}.frequency_penalty.BatchedFrequencyPenalizer._prepare", AFTER)
def count_frequencies(_: None, penalizer: BatchedFrequencyPenalizer) -> None:
    if (made := _made(penalizer)) is not None:
        penalties = penalizer.frequency_penalties[made[0], 0]
        penalizer.cumulated_frequency_penalties.index_put_(made, penalties, accumulate=True)


@hook(f"{PENALTIES}.presence_penalty.BatchedPresencePenalizer._prepare", AFTER)
def note_presence(_: None, penalizer: BatchedPresencePenalizer) -> None:
    if (made := _made(penalizer)) is not None:
        penalties = penalizer.presence_penalties[made[0], 0]
        penalizer.cumulated_presence_penalties.index_put_(made, penalties)


@hook(f"{PENALTIES}.repetition_penalty.BatchedRepetitionPenalizer._prepare", AFTER)
def note_repetition(_: None, penalizer: BatchedRepetitionPenalizer) -> None:
    if (made := _made(penalizer)) is not None:
        penalties = penalizer.repetition_penalties[made[0], 0]
        penalizer.cumulated_repetition_penalties.index_put_(made, penalties)


@hook(f"{PENALTIES}.min_new_tokens.BatchedMinNewTokensPenalizer._prepare", AFTER)
def count_tokens(_: None, penalizer: BatchedMinNewTokensPenalizer) -> None:
    lengths = [[len(req.output_ids)] for req in penalizer.orchestrator.reqs()]
    # avoid a copy to the device, which waits for the stream
    if any(length for (length,) in lengths):
        counted = penalizer.len_output_tokens
        counted.copy_(torch.tensor(lengths, dtype=counted.dtype))


def _made(penalizer: _BatchedPenalizer) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the rows and tokens to count, or None without tokens."""
    batch = penalizer.orchestrator.batch
    # a penalizer does not outlive its batch
    assert batch is not None
    rows: list[int] = []
    tokens: list[int] = []
    for row, req in enumerate(batch.reqs):
        # under overlap the next step counts the last token: its own is not sampled by then
        counted = list(req.output_ids[:-1] if batch.enable_overlap else req.output_ids)
        rows += [row] * len(counted)
        tokens += counted
    if not rows:
        return None
    device = penalizer.orchestrator.device
    return torch.tensor(rows, device=device), torch.tensor(tokens, device=device)


# ---- turns of a streaming session ------------------------------------------------------------


def move_kv_to_turn(sessions: StreamingSession, slot: SessionSlot, req: Req) -> None:
    """Move the session's KV to the retracted turn, so that the retraction frees it.

    The session stays in flight, and the turn recomputes the history when it runs again. The
    session keeps nothing of an unfinished turn. If the turn is aborted meanwhile, the next turn
    continues from the last finished one.
    """
    assert req.session is not None
    del sessions.slots[req.session.session_id]
    req.lock, slot.lock = slot.lock, None


@hook("sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req", AROUND)
def end_turn(keep: Callable[..., bool], sessions: StreamingSession, req: Req) -> bool:
    """Leave a finished request's row to its streaming session; free a retracted one's.

    KV that is fenced off is released: the next request recomputes its history.
    """
    slot = sessions.borrowed_slot(req)
    if slot is None:
        return keep(sessions, req)
    if not req.finished():
        move_kv_to_turn(sessions, slot, req)
        return False
    session = req.session
    is_kept = keep(sessions, req)
    if is_kept and session is not None and record_of(req).is_fenced_off:
        sessions.cache.release_session(session.session_id)
    return is_kept


@hook("sglang.srt.session.session_controller.Session.create_req", AFTER)
def detach_refused(req: Req, session: Session, *args: object, **kwargs: object) -> None:
    """Detach a refused turn from its session, so that it neither ends nor frees the running turn.

    ``create_req`` marks a refused turn by ``to_finish``.
    """
    if session.streaming and req.to_finish is not None:
        req.session = None


@hook("sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode", AFTER)
def end_turns_of_aborted(retracted: tuple[list[Req], float, list[Req]], *args: object) -> None:
    """End the session's turn for requests aborted for lack of memory, so that the next may run."""
    _, _, given_up = retracted
    for req in given_up:
        if req.session is not None and req.session.streaming:
            req.session.abort_req()


# ---- beam searches ---------------------------------------------------------------------------


def begin_beams_anew(scheduler: Scheduler, running: set[Req]) -> None:
    """Restart the beam searches among ``running``, before all of these are retracted."""
    for batch in scheduler._collect_inflight_batches():
        if batch is not None:
            strip_beam_tail(batch)
    # in the same order on every rank
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


# ---- aborted outside the output stream -------------------------------------------------------


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


# ---- no token sampled ------------------------------------------------------------------------


@hook(f"{PROCESSOR}.materialize_sampling_mask_output", AFTER)
def mask_nothing(_: None, reqs: list[Req], output: LogitsProcessorOutput | None) -> None:
    """Give each request of a batch that sampled nothing a list of no masks."""
    if output is None or not all(req.is_prefill_only for req in reqs):
        return
    output.next_token_sampling_mask_status = [SamplingMaskStatus.OK] * len(reqs)
    # SGLang reads as many masks from a list as the request has new tokens
    none: list[Any] = [[] for _ in reqs]
    output.next_token_sampling_mask_idx = output.next_token_sampling_logprobs = none


# ---- no token allowed ------------------------------------------------------------------------


@hook(f"{SAMPLING}.apply_logits_bias", AFTER)
@hook(f"{SAMPLING}.apply_logits_bias_with_observer", AFTER)
def unmask_rows_without_tokens(
    _: object, info: SamplingBatchInfo, logits: torch.Tensor, *args: object
) -> None:
    """Set all logits of a row without an allowed token to 0.

    A grammar may allow only text that no token begins with. All probabilities are then 0, and
    sampling ends the process, or on a CPU the scheduler. With equal logits some token is sampled.
    The grammar rejects it, and SGLang ends the request, as in greedy sampling. ``logits`` has
    shape (requests, vocabulary). Cost: two small kernels on the forward's stream, without a
    synchronization, only in steps with a grammar.
    """
    if info.grammar_mask is not None:
        nothing = logits.amax(dim=-1, keepdim=True) == float("-inf")
        logits.masked_fill_(nothing, 0.0)

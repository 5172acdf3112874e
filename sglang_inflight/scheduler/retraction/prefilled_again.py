"""Keeps parts of a retracted request that SGLang forgets when it prefills the request again.

SGLang would append the hidden states of the prompt and of all earlier tokens a second time. For a
request with ``input_embeds`` it would drop the earlier tokens, because it has embeddings of the
prompt only. But a stream may have sent some of these tokens. A full queue would end a retracted
request, which was accepted before.

This module hooks ``Req``, ``ForwardBatch``, ``SchedulerBatchResultProcessor`` and ``Scheduler``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from sglang_inflight.hooking import AFTER, AROUND, PROCESSOR, REQ, SCHEDULER, hook
from sglang_inflight.sglang_types import get_parallel

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_inflight.sglang_types import Scheduler

Embed = Callable[[torch.Tensor], torch.Tensor]


class TokenEmbeddings:
    """Flag: every model of this process exposes its token embedding.

    Set before the first request, on the scheduler's thread, and only read afterwards.
    """

    are_known = False


def look_for_embeddings(scheduler: Scheduler) -> None:
    """Find out whether ``TokenEmbeddings.are_known``."""
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


@hook(f"{SCHEDULER}._abort_on_queued_limit", AROUND)
def keep_accepted(limit: Callable[..., bool], scheduler: Scheduler, recv_req: Req) -> bool:
    """Keep retracted requests in a full queue: they were accepted before."""
    return not recv_req.is_retracted and limit(scheduler, recv_req)

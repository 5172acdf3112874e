"""Keeps a batch whose sampling SGLang does not expect: without a token, or with none allowed.

SGLang computes the prompt of ``n`` samples first, by a request of no new tokens. A batch of such
requests samples nothing and has no masks, and SGLang ends a request without its mask. A request
whose grammar allows no token ends the scheduler; here it ends alone.

This module hooks ``SamplingBatchInfo`` and ``SchedulerBatchResultProcessor``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.layers.logits_processor import SamplingMaskStatus

from sglang_inflight.hooking import AFTER, PROCESSOR, SAMPLING, hook

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


@hook(f"{PROCESSOR}.materialize_sampling_mask_output", AFTER)
def mask_nothing(_: None, reqs: list[Req], output: LogitsProcessorOutput | None) -> None:
    """Give each request of a batch that sampled nothing a list of no masks."""
    if output is None or not all(req.is_prefill_only for req in reqs):
        return
    output.next_token_sampling_mask_status = [SamplingMaskStatus.OK] * len(reqs)
    # SGLang reads as many masks from a list as the request has new tokens
    none: list[Any] = [[] for _ in reqs]
    output.next_token_sampling_mask_idx = output.next_token_sampling_logprobs = none


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

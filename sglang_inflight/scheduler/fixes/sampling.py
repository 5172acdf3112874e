"""Protects a batch from a request whose grammar allows no token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


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

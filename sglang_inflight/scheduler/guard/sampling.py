"""A request from which its grammar has taken every token, and the others of its batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from sglang_inflight.scheduler.sglang_types.sampling_batch_info import SamplingBatchInfo


def unmask_rows_without_tokens(
    _: object, info: SamplingBatchInfo, logits: torch.Tensor, *args: object
) -> None:
    """A grammar may allow what no token of the vocabulary begins with. Nothing has a probability
    then, and drawing from that ends the process, or the scheduler on a CPU.

    So such a row is drawn from as if every token were as likely as every other; the grammar does
    not accept what comes, and SGLang ends the request for it, as it does where nothing is drawn
    because the most likely token is taken. ``logits``: requests by vocabulary. Two small kernels
    on the forward's stream, and no wait for them, in steps with a grammar alone.
    """
    if info.grammar_mask is not None:
        nothing = logits.amax(dim=-1, keepdim=True) == float("-inf")
        logits.masked_fill_(nothing, 0.0)

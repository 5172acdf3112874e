"""Counts the tokens that a retracted request has made, for penalties.

SGLang counts a request's tokens step by step, in tensors of its batch. In its next batch a
retracted request would start from zero: ``frequency_penalty``, ``presence_penalty`` and
``repetition_penalty`` would forget its tokens, and ``min_new_tokens`` more would have to come. The
hooks run where SGLang makes the tensors, on the scheduler's stream. A request without a retraction
has no tokens there, or its count changes nothing.

This module hooks SGLang's penalizers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_inflight.hooking import AFTER, PENALTIES, hook

if TYPE_CHECKING:
    from sglang.srt.sampling.penaltylib.frequency_penalty import BatchedFrequencyPenalizer
    from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer
    from sglang.srt.sampling.penaltylib.orchestrator import _BatchedPenalizer
    from sglang.srt.sampling.penaltylib.presence_penalty import BatchedPresencePenalizer
    from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer


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
    vocab_size = penalizer.orchestrator.vocab_size
    rows: list[int] = []
    tokens: list[int] = []
    for row, req in enumerate(batch.reqs):
        counted = list(req.output_ids)
        if batch.enable_overlap:
            # each step counts the token that the step before it was given: first the prompt's last
            counted = [*req.origin_input_ids[-1:], *counted[:-1]] if counted else []
        # an image's pad value is no token
        counted = [token for token in counted if token < vocab_size]
        rows += [row] * len(counted)
        tokens += counted
    if not rows:
        return None
    device = penalizer.orchestrator.device
    return torch.tensor(rows, device=device), torch.tensor(tokens, device=device)

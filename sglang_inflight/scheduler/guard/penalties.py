"""Penalties of a retracted request, for the tokens that it has made before.

SGLang counts a request's tokens step by step, in tensors of the batch that makes them. A retracted
request comes to another batch, and is counted from nothing: ``frequency_penalty``,
``presence_penalty`` and ``repetition_penalty`` forget its tokens, and ``min_new_tokens`` more have
to come before it may end. Runs where SGLang makes the tensors, on the scheduler's stream. Of
requests that were never retracted there are no tokens then, or a penalty that changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.penalizers import (
        FrequencyPenalizer,
        MinNewTokensPenalizer,
        Penalizer,
        PresencePenalizer,
        RepetitionPenalizer,
    )


def count_frequencies(_: None, penalizer: FrequencyPenalizer) -> None:
    if (made := _made(penalizer)) is not None:
        penalties = penalizer.frequency_penalties[made[0], 0]
        penalizer.cumulated_frequency_penalties.index_put_(made, penalties, accumulate=True)


def note_presence(_: None, penalizer: PresencePenalizer) -> None:
    if (made := _made(penalizer)) is not None:
        penalties = penalizer.presence_penalties[made[0], 0]
        penalizer.cumulated_presence_penalties.index_put_(made, penalties)


def note_repetition(_: None, penalizer: RepetitionPenalizer) -> None:
    if (made := _made(penalizer)) is not None:
        penalties = penalizer.repetition_penalties[made[0], 0]
        penalizer.cumulated_repetition_penalties.index_put_(made, penalties)


def count_tokens(_: None, penalizer: MinNewTokensPenalizer) -> None:
    lengths = [[len(req.output_ids)] for req in penalizer.orchestrator.reqs()]
    # the copy to a device waits for it
    if any(length for (length,) in lengths):
        counted = penalizer.len_output_tokens
        counted.copy_(torch.tensor(lengths, dtype=counted.dtype))


def _made(penalizer: Penalizer) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rows and tokens that are to be counted; None where there are none."""
    batch = penalizer.orchestrator.batch
    rows: list[int] = []
    tokens: list[int] = []
    for row, req in enumerate(batch.reqs):
        # under overlap the next step counts the last of them: its own token is not known then
        counted = list(req.output_ids[:-1] if batch.enable_overlap else req.output_ids)
        rows += [row] * len(counted)
        tokens += counted
    if not rows:
        return None
    device = penalizer.orchestrator.device
    return torch.tensor(rows, device=device), torch.tensor(tokens, device=device)

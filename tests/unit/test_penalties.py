"""SGLang's own penalizers, with and without a retraction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

from sglang_inflight.scheduler.retraction import penalties

VOCAB, PROMPT, END = 8, 7, 6
HOOKS = {
    BatchedFrequencyPenalizer: penalties.count_frequencies,
    BatchedPresencePenalizer: penalties.note_presence,
    BatchedRepetitionPenalizer: penalties.note_repetition,
    BatchedMinNewTokensPenalizer: penalties.count_tokens,
}
# tokens of each request. The last request has no penalties.
MADE: tuple[list[int], ...] = ([3, 4, 3], [], [5, 5])


class Batch:
    """Requests with the given output tokens."""

    def __init__(self, made: tuple[list[int], ...], *, enable_overlap: bool) -> None:
        self.device, self.enable_overlap = "cpu", enable_overlap
        self.reqs = [request(tokens, is_penalized=i < 2) for i, tokens in enumerate(made)]
        self.penalizers = BatchedPenalizerOrchestrator(VOCAB, cast(Any, self), set(HOOKS))

    def penalize(self) -> torch.Tensor:
        logits = torch.ones(len(self.reqs), VOCAB)
        self.penalizers.apply(logits)
        return logits


def request(tokens: list[int], *, is_penalized: bool) -> Any:
    params = SimpleNamespace(
        frequency_penalty=0.5 if is_penalized else 0.0,
        presence_penalty=0.25 if is_penalized else 0.0,
        repetition_penalty=2.0 if is_penalized else 1.0,
        min_new_tokens=3 if is_penalized else 0,
        stop_token_ids=None,
    )
    return SimpleNamespace(
        sampling_params=params, output_ids=tokens, origin_input_ids=[1, PROMPT],
        eos_token_ids={END},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=END),
    )  # fmt: skip


@pytest.mark.parametrize("enable_overlap", [False, True], ids=["normal", "overlap"])
def test_retraction_keeps_penalties(monkeypatch: pytest.MonkeyPatch, enable_overlap: bool) -> None:
    undisturbed = Batch(([], [], []), enable_overlap=enable_overlap)
    # count like ``ScheduleBatch.cumulate_penalty_output_tokens``: one step behind under overlap
    for step in range(max(map(len, MADE))):
        for req, tokens in zip(undisturbed.reqs, MADE, strict=True):
            req.output_ids = tokens[: step + (not enable_overlap)]
        last = [[*req.origin_input_ids, *req.output_ids][-1] for req in undisturbed.reqs]
        undisturbed.penalizers.cumulate_output_tokens(torch.tensor(last))
    for penalizer, hook in HOOKS.items():
        prepare = penalizer._prepare

        def prepare_and_count(self: Any, prepare: Any = prepare, hook: Any = hook) -> None:
            prepare(self)
            hook(None, self)

        monkeypatch.setattr(penalizer, "_prepare", prepare_and_count)
    again = Batch(MADE, enable_overlap=enable_overlap)
    # the first batch went on counting for requests with fewer tokens
    assert again.penalize()[0].tolist() == undisturbed.penalize()[0].tolist()
    assert (
        again.penalize()[1].tolist()
        == Batch(([],) * 3, enable_overlap=False).penalize()[1].tolist()
    )
    assert again.penalize()[2].tolist() == [1.0] * VOCAB

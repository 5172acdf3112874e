"""A re-prefill keeps the embeddings and hidden states of earlier tokens."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from sglang_inflight.scheduler.retraction import prefilled_again
from sglang_inflight.scheduler.retraction.prefilled_again import append_hidden_states, embed_tokens

WIDTH = 2


class Model(torch.nn.Module):
    """Embeds token t as (t, t)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Embedding(100, WIDTH)
        self.layer.weight.data = torch.arange(100.0)[:, None].expand(100, WIDTH).contiguous()
        self.get_input_embeddings: Any = lambda: self.layer


class EmbedsItself(Model):
    def __init__(self) -> None:
        super().__init__()
        self.get_input_embeddings = lambda input_ids: self.layer(input_ids)


def batch(*requests: tuple[list[list[float]] | None, int, int]) -> Any:
    """Build a batch of requests with these embeddings, cached tokens and tokens to compute."""
    embeddings, prefixes, lengths = zip(*requests, strict=True)
    return SimpleNamespace(
        reqs=[SimpleNamespace(input_embeds=each) for each in embeddings],
        prefix_lens=list(prefixes), extend_lens=list(lengths), forward_mode=ForwardMode.EXTEND,
    )  # fmt: skip


def embedded(batch: Any, given: list[float], ids: list[int], model: Model) -> list[float]:
    rows = torch.tensor([[each] * WIDTH for each in given])
    forward: Any = SimpleNamespace(input_embeds=rows, input_ids=torch.tensor(ids))
    runner: Any = SimpleNamespace(model=model)
    with torch.no_grad():
        embed_tokens(forward, None, batch, runner)
    assert forward.input_embeds.shape == (len(ids), WIDTH)
    return list(forward.input_embeds[:, 0].tolist())


@pytest.fixture(autouse=True)
def _first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefilled_again, "get_parallel", lambda: SimpleNamespace(pp_rank=0))


@pytest.mark.parametrize("model", [Model(), EmbedsItself()])
def test_output_tokens_are_embedded_beside_embeddings(model: Model) -> None:
    prompt = [[0.5] * WIDTH, [1.5] * WIDTH, [2.5] * WIDTH]
    # a request with two output tokens; one without embeddings; and two partial prefills
    prefill = batch((prompt, 0, 5), (None, 0, 2), (prompt, 1, 1), (prompt, 3, 1))
    rows = embedded(prefill, [0.5, 1.5, 2.5, 1.5], [1, 1, 1, 7, 8, 20, 21, 1, 9], model)
    assert rows == [0.5, 1.5, 2.5, 7.0, 8.0, 20.0, 21.0, 1.5, 9.0]


def test_prompt_embeddings_are_unchanged() -> None:
    prompt = [[0.5] * WIDTH, [1.5] * WIDTH]
    assert embedded(batch((prompt, 0, 2)), [0.5, 1.5], [1, 1], Model()) == [0.5, 1.5]


@pytest.mark.parametrize("mode", [CaptureHiddenMode.FULL, CaptureHiddenMode.LAST])
@pytest.mark.parametrize("wanted", [True, "last"])
def test_reprefill_adds_one_row_of_hidden_states(mode: CaptureHiddenMode, wanted: Any) -> None:
    processor: Any = object.__new__(SchedulerBatchResultProcessor)
    append = partial(
        append_hidden_states,
        SchedulerBatchResultProcessor._append_prefill_hidden_states,
        processor,
        capture_hidden_mode=mode,
    )
    # two requests, the second with an earlier output token
    states = [[1.0], [2.0], [3.0], [4.0]] if mode is CaptureHiddenMode.FULL else [[2.0], [4.0]]
    output = SimpleNamespace(hidden_states=torch.tensor(states))
    first: Any = SimpleNamespace(output_ids=[], hidden_states=[], return_hidden_states=wanted)
    later: Any = SimpleNamespace(
        output_ids=[5], hidden_states=["of the first"], return_hidden_states=wanted
    )
    end = 0
    for req in (first, later):
        end = append(req=req, logits_output=output, hidden_state_offset=end, extend_input_len=2)
    assert end == len(states)
    block = [[1.0], [2.0]] if mode is CaptureHiddenMode.FULL and wanted is True else [2.0]
    assert first.hidden_states == [block]
    assert later.hidden_states == ([[4.0]] if wanted == "last" else ["of the first", [4.0]])

"""A draft that shares a weight with its target: the weight has one shadow, and swaps once."""

from __future__ import annotations

import pickle
import queue
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from sglang_inflight.messages import OpenCall, SealCall, StageCall, TensorSource
from sglang_inflight.scheduler.staging import sources
from sglang_inflight.scheduler.staging import staging as staging_module
from sglang_inflight.scheduler.staging.mode import StagingMode
from sglang_inflight.scheduler.staging.pace import Pace
from sglang_inflight.scheduler.staging.staging import Staging
from sglang_inflight.settings import Settings


class Model(nn.Module):
    """``own`` is its own weight, ``embed`` may be another model's."""

    def __init__(self, embed: nn.Parameter) -> None:
        super().__init__()
        self.embed = embed
        self.own = nn.Parameter(torch.zeros(2), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name in parameters:
                load: Any = parameters[name]
                load.weight_loader(load, tensor)


class Answers:
    """In place of the channel to the front end; the staging thread answers here."""

    def __init__(self) -> None:
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def succeed(self, call: object, **detail: Any) -> None:
        self._heard.put(detail)

    def fail(self, call: object, error: Exception) -> None:
        self._heard.put(error)

    def hear(self) -> Any:
        heard = self._heard.get(timeout=60)
        assert not isinstance(heard, Exception), heard
        return heard


class Counters:
    """In place of the metrics."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(inc=lambda amount: None)


def test_weight_that_a_draft_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_rank = SimpleNamespace(tp_rank=0, tp_size=1, dp_rank=0, dp_size=1, attn_dp_enabled=False)
    monkeypatch.setattr(sources, "get_parallel", lambda: one_rank)
    # that is agreed on by ranks in a group
    monkeypatch.setattr(staging_module, "choose_mode", lambda *_: StagingMode.DEVICE)
    embed = nn.Parameter(torch.zeros(2), requires_grad=False)
    target, draft = Model(embed), Model(embed)
    runners = [("target", _runner(target, tmp_path)), ("draft", _runner(draft, tmp_path))]
    updater = SimpleNamespace(_select_runners=lambda selector: runners)
    answers = Answers()
    staging = Staging(
        cast(Any, SimpleNamespace(weight_updater=updater)),
        cast(Any, None),
        cast(Any, answers),
        Pace(0, is_busy=lambda: False),
        cast(Any, Counters()),
        Settings(staging="device"),
    )

    def values() -> list[float]:
        return [float(weight[0]) for weight in (target.embed, draft.embed, target.own, draft.own)]

    def exchange() -> None:
        staging.exchange(("target", "draft"))

    named = [("embed", torch.ones(2)), ("own", torch.full((2,), 2.0))]
    # read once, as all sources but a disk are
    source = TensorSource(serialized_named_tensors=[pickle.dumps(named)])
    update: dict[str, Any] = {"call_id": "", "update_id": "u", "timeout_s": 60.0}
    staging.open(OpenCall(**update, partial=False), current_version="v0")
    staging.stage(StageCall(**update, source=source))
    staging.seal(SealCall(**update))
    for _ in range(3):
        answers.hear()
    assert values() == [0, 0, 0, 0]

    staging.take("u")
    exchange()
    assert values() == [1, 1, 2, 2]
    exchange()
    assert values() == [0, 0, 0, 0]


def _runner(model: nn.Module, folder: Path) -> Any:
    return SimpleNamespace(
        model=model,
        model_config=SimpleNamespace(model_path=str(folder), dtype=torch.float32),
        weight_updater=SimpleNamespace(custom_weight_loaders=[]),
    )

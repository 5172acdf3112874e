"""A training by TRL's ``AsyncGRPOTrainer``, with rollouts through every update."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import marker
from harness.server import Server
from tests.support.load import ask, status, until
from tests.trainers.trl.conftest import ServedModel
from tests.trainers.trl.policy import Reference
from tests.trainers.trl.processes import PATIENCE_S, running
from tests.trainers.trl.recorder import COMPLETIONS, LOAD_ADAPTER, Completion, Recorder

STEPS, TOKENS = 12, 48
WORDS = [f"t{word}" for word in range(300, 308)]
EOS = marker.CONFIG["eos_token_id"]
UPDATE = "/update_weights"
# Both sides compute in float32, and in another order. Their logits are below 20 and have rounding
# errors of some 1e-6 each. Neighbouring policies differ by more than APART.
BOUND, APART = 1e-4, 1e-2

pytestmark = pytest.mark.timeout(2 * PATIENCE_S)


@pytest.fixture
def recorder(served: ServedModel, tmp_path: Path) -> Iterator[Recorder]:
    kept = tmp_path / "kept"
    kept.mkdir()
    with Recorder(served.server, kept).serving() as recorder:
        yield recorder


def settings(served: ServedModel, recorder: Recorder, output: Path, **more: Any) -> dict[str, Any]:
    """Return a trainer's settings, and have the recorder keep what that trainer sends."""
    output.mkdir(exist_ok=True)
    recorder.synced = output / "policy.safetensors"
    return {
        "url": recorder.url,
        "model": str(served.model),
        "output": str(output),
        "steps": STEPS,
        "tokens": TOKENS,
        "rank": served.rank,
        "words": WORDS,
        "resume": False,
        **more,
    }


def test_training_labels_every_token_with_the_policy_that_made_it(
    served: ServedModel, recorder: Recorder, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    with running(
        "train.py", tmp_path / "trainer.log", **settings(served, recorder, output)
    ) as trainer:
        trainer.finish()
    summary = json.loads((output / "summary.json").read_text())
    assert summary["sync_is_by_adapter"] == bool(served.rank)
    # one before the first step, and one after each
    synced = recorder.adapters if served.rank else recorder.weights
    assert summary["syncs"] == STEPS + 1 == len(synced)
    expect_rewards(summary["log"], output / "scores.jsonl", recorder)
    expect_none_lost(served.server, recorder)
    expect_policies(served, recorder)


def test_trainer_killed_in_a_sync_is_replaced_and_trains_on(
    served: ServedModel, recorder: Recorder, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    sync = LOAD_ADAPTER if served.rank else UPDATE
    with running(
        "train.py", tmp_path / "first.log", **settings(served, recorder, output)
    ) as trainer:

        def has_synced() -> bool:
            trainer.check()
            return recorder.arrivals.count(sync) > 3

        until("three syncs", has_synced, patience_s=PATIENCE_S)
        recorder.before(sync, trainer.kill)
        until("the kill", lambda: not recorder.awaits(sync), patience_s=PATIENCE_S)
    assert not (output / "summary.json").exists()
    until("its pause ends by the lease", lambda: not status(served.server)["paused"])
    expect_serving(served)
    with running(
        "train.py", tmp_path / "second.log", **settings(served, recorder, output, resume=True)
    ) as trainer:
        trainer.finish()
    summary = json.loads((output / "summary.json").read_text())
    assert [row["step"] for row in summary["log"] if "loss" in row] == [*range(1, STEPS + 1)]
    expect_none_lost(served.server, recorder)
    expect_policies(served, recorder)


def expect_serving(served: ServedModel) -> None:
    body = {"model": str(served.model), "prompt": [5], "max_tokens": 3, "ignore_eos": True}
    answer = ask(served.server, "POST", COMPLETIONS, body)
    assert answer["usage"]["completion_tokens"] == 3


def expect_rewards(log: list[dict[str, Any]], scores: Path, recorder: Recorder) -> None:
    """Expect finite rewards at each step, of completions that the server gave."""
    steps = [row for row in log if "loss" in row]
    assert len(steps) == STEPS
    for row in steps:
        assert 0 < row["reward"] < 1
        assert math.isfinite(row["loss"])
        # TRL counts requests that failed
        assert "rollout/vllm_retry_total" not in row
    given = {tuple(completion.choice["token_ids"]) for completion in recorder.completions}
    scored = [json.loads(line) for line in scores.read_text().splitlines()]
    assert len(scored) >= STEPS * 8
    for score in scored:
        tokens = tuple(score["token_ids"])
        assert tokens in given
        assert score["reward"] == sum(token % 2 == 0 for token in tokens) / len(tokens)


def expect_none_lost(server: Server, recorder: Recorder) -> None:
    """Expect every request to have ended by itself, also those of trainers that have gone."""
    until(
        "all answers",
        lambda: len(recorder.completions) == recorder.arrivals.count(COMPLETIONS),
    )
    for completion in recorder.completions:
        assert completion.status == 200, completion.answer
        choice = completion.choice
        tokens = choice["token_ids"]
        ending = "stop" if tokens[-1] == EOS else "length"
        assert choice["finish_reason"] == ending
        assert ending == "stop" or len(tokens) == TOKENS
    assert server.is_alive()


def expect_policies(served: ServedModel, recorder: Recorder) -> None:
    """Expect the log-probabilities of each token to be those of the policy that its span names."""
    reference = Reference(served.model)
    spans: dict[Any, list[tuple[Completion, slice]]] = defaultdict(list)
    for completion in recorder.completions:
        parts = _adapter_spans(completion, recorder) if served.rank else _weight_spans(completion)
        assert [at.start for _, at in parts] == [0, *(at.stop for _, at in parts)][:-1]
        assert parts[-1][1].stop == len(completion.choice["token_ids"])
        for version, at in parts:
            spans[version].append((completion, at))
    if not served.rank:
        # rollouts went through updates
        assert any(len(_weight_spans(each)) > 1 for each in recorder.completions)
    assert len(spans) > STEPS // 2
    policies: dict[Any, Path] = {**(recorder.adapters if served.rank else recorder.weights)}
    assert spans.keys() <= policies.keys()
    # versions of adapters and epochs count up
    in_order = sorted(policies.items(), key=lambda item: int(item[0]))
    for (_, before), (version, policy) in pairwise(in_order):
        if version not in spans:
            continue
        assert _worst(reference, served, policy, spans[version]) < BOUND
        # a trainer that comes back sends the policy of its checkpoint again
        if _content(before) != _content(policy):
            assert _worst(reference, served, before, spans[version]) > APART


def _content(policy: Path) -> bytes:
    return (policy / "adapter_model.safetensors" if policy.is_dir() else policy).read_bytes()


def _weight_spans(completion: Completion) -> list[tuple[Any, slice]]:
    return [
        (span["epoch"], slice(span["start"], span["end"]))
        for span in completion.choice["weight_versions"]
    ]


def _adapter_spans(completion: Completion, recorder: Recorder) -> list[tuple[Any, slice]]:
    spans = completion.choice["adapter_versions"]
    for span in spans:
        assert span["adapter"] == completion.body["model"] == recorder.names[span["version"]]
    return [(span["version"], slice(span["start"], span["end"])) for span in spans]


def _worst(
    reference: Reference, served: ServedModel, policy: Path, parts: list[tuple[Completion, slice]]
) -> float:
    """Return the largest difference between what was said of the parts and what ``policy`` says."""
    if served.rank:
        reference.take_adapter(policy)
    else:
        reference.take_weights(policy)
    whole = [[*each.body["prompt"], *each.choice["token_ids"]] for each, _ in parts]
    worst = 0.0
    for (completion, at), values in zip(parts, reference.logprobs(whole), strict=True):
        said = torch.tensor(completion.choice["logprobs"]["token_logprobs"])
        worst = max(worst, float((said - values[-len(said) :])[at].abs().max()))
    return worst

"""The calls of TRL's ``VLLMClient``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.server import serve
from tests.trainers.environment import python_of
from tests.trainers.trl.policy import Reference
from tests.trainers.trl.processes import PATIENCE_S, running

PROMPTS = [[5, 6, 7], [8, 9]]
TOP = 20
# the same bound as in test_training.py
BOUND = 1e-4

pytestmark = pytest.mark.timeout(2 * PATIENCE_S)


def test_client_generates_scores_and_sends_weights(model: Path, tmp_path: Path) -> None:
    python_of("trl")
    first = model / "model.safetensors"
    policies = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for number, file in enumerate(policies, start=1):
        scale = 1 + number / 10
        save_file({name: tensor * scale for name, tensor in load_file(first).items()}, file)
    output = tmp_path / "answers.json"
    log = tmp_path / "server.log"
    env = {"SGLANG_INFLIGHT_VLLM_ROUTES": "1"}
    with serve(model, "--dtype", "float32", log=log, env=env) as server:
        settings = {
            "url": server.url,
            "output": str(output),
            "prompts": PROMPTS,
            "text": "t5 t6",
            "top": TOP,
            "policies": [str(file) for file in policies],
        }
        with running("client_calls.py", tmp_path / "client.log", **settings) as client:
            client.finish()
        assert server.is_alive()
    answers = json.loads(output.read_text())
    reference = Reference(model)
    expect_generated(reference, answers["generate"], [0, 0, 1, 1], PROMPTS)
    expect_generated(reference, answers["chat"], [0, 0], [[5, 6]])
    for file, scores in zip([first, *policies], answers["scores"], strict=True):
        reference.take_weights(file)
        expect_scores(reference, scores, answers["sequences"], answers["lengths"])


def expect_generated(
    reference: Reference, answer: dict[str, Any], made_from: list[int], prompts: list[list[int]]
) -> None:
    assert answer["prompt_ids"] == prompts
    completions = answer["completion_ids"]
    whole = [
        prompts[prompt] + tokens for prompt, tokens in zip(made_from, completions, strict=True)
    ]
    for number, values in enumerate(reference.logprobs(whole)):
        tokens = completions[number]
        said = [
            dict(zip(ids, logprobs, strict=True))[token]
            for token, ids, logprobs in zip(
                tokens,
                answer["logprob_token_ids"][number],
                answer["logprobs"][number],
                strict=True,
            )
        ]
        assert (torch.tensor(said) - values[-len(tokens) :]).abs().max() < BOUND


def expect_scores(
    reference: Reference, scores: dict[str, Any], sequences: list[list[int]], lengths: list[int]
) -> None:
    """Expect the log-probabilities of completions' own tokens, and the likeliest tokens'."""
    for number, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        (own,) = reference.logprobs([sequence])
        said = torch.tensor(scores["actual_logprobs"][number])[:, 0]
        assert scores["actual_token_ids"][number] == [[token] for token in sequence[length:]]
        assert (said - own[length - 1 :]).abs().max() < BOUND
        values, _ = reference.likeliest(sequence, TOP)
        assert (torch.tensor(scores["logprobs"][number]) - values[length - 1 :]).abs().max() < BOUND

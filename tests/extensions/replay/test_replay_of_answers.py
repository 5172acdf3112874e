"""Answers of several samples and of other routes, as files for the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.server import Server
from sglang_inflight.cli import app
from tests.extensions.replay.test_replay import (
    DRAWN,
    FLAGS,
    LENGTH,
    REPLAY,
    across_a_commit,
    begin,
    build_first,
    ended,
)
from tests.support.load import ask, prompt, update
from tests.support.pool import FLAVOURS, Flavour, ServerPool

RECORD = {"record": "replay"}
TOKENS = 30
# beside other samples a CPU's numbers differ in their last bits
TOLERANCE = ("--tolerance", "0.05")
FLAVOURS["replay_routes"] = Flavour(
    FLAGS, {**REPLAY, "SGLANG_INFLIGHT_VLLM_ROUTES": "1"}, model=build_first
)


@pytest.fixture
def server(pool: ServerPool, versions: Path) -> Iterator[Server]:
    server = pool.get(FLAVOURS["replay_routes"])
    update(server, versions, 0, kv_cache="recompute")
    yield server
    pool.restore()


def command(server: Server, versions: Path, *arguments: str) -> Any:
    folders = [f"--checkpoint=v{version}={versions / f'v{version}'}" for version in range(2)]
    return CliRunner().invoke(app, ["replay", "--url", server.url, *folders, *arguments])


def expect_equal(result: Any, rollouts: int) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["equal"] for line in lines] == [True] * rollouts
    assert all(line["largest"] is not None for line in lines)
    return lines


def test_samples_of_one_request_are_made_again(
    server: Server, versions: Path, tmp_path: Path
) -> None:
    body = {
        "input_ids": prompt(LENGTH),
        "sampling_params": DRAWN | {"n": 3, "max_new_tokens": TOKENS, "custom_params": RECORD},
        "return_logprob": True,
    }
    answers = ask(server, "POST", "/generate", body)
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 3
    file = tmp_path / "answers.json"
    file.write_text(json.dumps({"request": body, "answer": answers}))
    expect_equal(command(server, versions, str(file), *TOLERANCE, "--json"), 3)


def test_choices_of_vllms_route_are_made_again(
    server: Server, versions: Path, tmp_path: Path
) -> None:
    sampling = {
        **DRAWN, "n": 2, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0,
        "extra_args": RECORD,
    }  # fmt: skip
    body = {"token_ids": prompt(LENGTH), "sampling_params": sampling}
    answer = ask(server, "POST", "/inference/v1/generate", body)
    assert all(len(choice["token_ids"]) == TOKENS for choice in answer["choices"])
    file = tmp_path / "answer.json"
    file.write_text(json.dumps({"request": body, "answer": answer}))
    expect_equal(command(server, versions, str(file), *TOLERANCE, "--json"), 2)


def test_choices_of_openais_route_are_made_again(
    server: Server, versions: Path, tmp_path: Path
) -> None:
    body = {
        "model": "default", "prompt": prompt(LENGTH), **DRAWN, "max_tokens": TOKENS, "n": 2,
        "ignore_eos": True, "logprobs": 0, "custom_params": RECORD, "return_token_ids": True,
        "return_weight_versions": True,
    }  # fmt: skip
    answer = ask(server, "POST", "/v1/completions", body)
    file = tmp_path / "answer.json"
    file.write_text(json.dumps({"request": {"input_ids": body["prompt"]}, "answer": answer}))
    expect_equal(command(server, versions, str(file), *TOLERANCE, "--json"), 2)


def test_trainers_log_probabilities_are_compared_by_version(
    server: Server, versions: Path, tmp_path: Path
) -> None:
    """The trainer of this test computes log probabilities 0.25 nats below the server's."""
    folder = tmp_path / "answers"
    folder.mkdir()
    rollout = across_a_commit(server, versions, folder)
    assert rollout.logprobs is not None
    trained = tmp_path / "trainer.json"
    trained.write_text(json.dumps({rollout.name: [each - 0.25 for each in rollout.logprobs]}))
    (line,) = expect_equal(
        command(server, versions, str(folder), "--trainer", str(trained), "--json"), 1
    )
    by_version = {each["version"]: each for each in line["mismatch"]["trainer"]}
    assert by_version.keys() == {"v0", "v1"}
    for each in by_version.values():
        assert each["mean"] == pytest.approx(0.25)
        assert each["ratio_variance"] == pytest.approx(0, abs=1e-6)
    trained.write_text("[[-1.0]]")
    result = command(server, versions, str(folder), "--trainer", str(trained))
    assert result.exit_code == 1
    assert f"needs {len(rollout.tokens)} log probabilities for {rollout.name}" in " ".join(
        result.output.split()
    )


def test_server_without_the_setting_says_what_it_lacks(
    pool: ServerPool, server: Server, versions: Path, tmp_path: Path
) -> None:
    ended(begin(server, 5), tmp_path)
    pool.restore()
    plain = pool.get(FLAVOURS["server"])
    result = command(plain, versions, str(tmp_path))
    assert result.exit_code == 1
    assert "SGLANG_INFLIGHT_REPLAY" in result.output


def test_answer_without_a_record_is_refused(server: Server, tmp_path: Path) -> None:
    body = {"input_ids": prompt(LENGTH), "sampling_params": {"max_new_tokens": 2}}
    file = tmp_path / "answer.json"
    file.write_text(json.dumps({"request": body, "answer": ask(server, "POST", "/generate", body)}))
    result = CliRunner().invoke(app, ["replay", str(file)])
    assert result.exit_code == 1
    assert "has no record" in result.output

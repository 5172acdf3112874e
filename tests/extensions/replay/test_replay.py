"""A rollout, made again: the same tokens, by the same versions, with the same numbers.

The model has random weights, so each version makes other tokens.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.server import Server
from harness.starting import Process, start
from sglang_inflight.cli import app
from sglang_inflight.extensions.replay.compare import Verdict
from sglang_inflight.extensions.replay.examine import examine
from sglang_inflight.extensions.replay.play import Stage
from sglang_inflight.extensions.replay.rollout import Rollout, read_rollouts
from sglang_inflight.vocabulary.errors import InflightError
from tests.support import random_model
from tests.support.load import (
    ENDLESS,
    Generation,
    ask,
    more_tokens,
    pause,
    prompt,
    resume,
    settle,
    start_running,
    until,
    until_made_by,
    update,
)
from tests.support.plugins import with_plugin
from tests.support.pool import CHUNK, FLAVOURS, MAX_RUNNING, Flavour, ServerPool, add_both_loops
from tests.test_bad_requests import expect_refusal, generate

LENGTH = 40
# least number of tokens of a rollout without a commit
TOKENS = 20
REPLAY = {"SGLANG_INFLIGHT_REPLAY": "1"}
FLAGS = (
    "--chunked-prefill-size", str(CHUNK),
    "--max-running-requests", str(MAX_RUNNING),
    "--weight-version", "v0",
)  # fmt: skip


def build_first(folder: Path) -> Path:
    return random_model.build(folder, 0)


LOOPS = add_both_loops("replay", Flavour(FLAGS, REPLAY, model=build_first))
FLAVOURS["replay_ranks"] = Flavour((*FLAGS, "--tp-size", "2"), REPLAY, model=build_first)
FLAVOURS["replay_seeded"] = Flavour(
    (*FLAGS, "--enable-deterministic-inference", "--attention-backend", "torch_native"),
    {**REPLAY, **with_plugin("seeded")},
    model=build_first,
)
LIVE: dict[str, Any] = {"non_blocking": True}
GREEDY: dict[str, Any] = {"temperature": 0}
DRAWN: dict[str, Any] = {"temperature": 1.0}


@pytest.fixture(params=[*LOOPS, "replay_ranks"])
def server(request: pytest.FixtureRequest, pool: ServerPool, versions: Path) -> Iterator[Server]:
    server = pool.get(FLAVOURS[request.param])
    update(server, versions, 0, kv_cache="recompute")
    yield server
    pool.restore()


@pytest.fixture(params=LOOPS)
def one_rank(request: pytest.FixtureRequest, pool: ServerPool, versions: Path) -> Iterator[Server]:
    server = pool.get(FLAVOURS[request.param])
    update(server, versions, 0, kv_cache="recompute")
    yield server
    pool.restore()


@pytest.fixture
def stage(server: Server, versions: Path) -> Iterator[Stage]:
    yield from make_stage(server, versions)


def make_stage(server: Server, versions: Path) -> Iterator[Stage]:
    paths = {folder.name: str(folder) for folder in versions.iterdir()}
    with Stage(server.url, paths) as stage:
        yield stage


def begin(
    server: Server,
    tokens: int,
    sampling: dict[str, Any] = GREEDY,
    input_ids: list[int] | None = None,
    **fields: Any,
) -> Generation:
    return Generation(
        server,
        tokens=tokens,
        input_ids=prompt(LENGTH) if input_ids is None else input_ids,
        sampling={
            **sampling,
            "custom_params": {"record": "replay", **sampling.get("custom_params", {})},
        },
        return_logprob=True,
        return_prompt_token_ids=True,
        **fields,
    )


def ended(generation: Generation, folder: Path) -> Rollout:
    """Return the rollout, by way of a file."""
    output = generation.output()
    answer = {
        "output_ids": output.tokens,
        "prompt_token_ids": generation._body["input_ids"],
        "meta_info": output.meta,
    }
    file = folder / f"{generation.rid}.json"
    file.write_text(json.dumps(answer))
    (rollout,) = read_rollouts(file)
    return rollout


def cut(generation: Generation, folder: Path) -> Rollout:
    """End an endless rollout, and return it.

    A step on two ranks takes long, so a rollout is no longer than its commits need.
    """
    generation.abort()
    return ended(generation, folder)


def retract(server: Server, generations: list[Generation]) -> None:
    """Retract requests, and wait until each has three tokens more."""
    pause(server, "retract")
    counts = settle(server, generations)
    resume(server)
    for generation, count in zip(generations, counts, strict=True):
        generation.wait_for_tokens(count + 3)


def across_a_commit(
    server: Server,
    versions: Path,
    folder: Path,
    sampling: dict[str, Any] = GREEDY,
    kv: str = "keep",
) -> Rollout:
    """Return a rollout whose first tokens are by v0, and whose last ones are by v1."""
    generation = begin(server, ENDLESS, sampling)
    generation.wait_for_tokens(3)
    update(server, versions, 1, kv_cache=kv, **LIVE)
    until_made_by(generation, 1)
    rollout = cut(generation, folder)
    assert rollout.commits == 1
    return rollout


def replayed(stage: Stage, rollout: Rollout) -> Verdict:
    return examine(stage, rollout, [], 0.0).verdict


@pytest.mark.parametrize(
    ("commits", "kv", "sampling"),
    [
        (0, "keep", DRAWN),
        (1, "keep", DRAWN),
        (1, "fence", GREEDY),
        (1, "recompute", DRAWN),
        (3, "keep", GREEDY),
        (3, "fence", DRAWN),
        (3, "recompute", GREEDY),
    ],
    ids=lambda value: f"temperature {value['temperature']}" if isinstance(value, dict) else None,
)
def test_rollout_across_commits_is_made_again(
    server: Server,
    stage: Stage,
    versions: Path,
    tmp_path: Path,
    commits: int,
    kv: str,
    sampling: dict[str, Any],
) -> None:
    generation = begin(server, ENDLESS, sampling)
    generation.wait_for_tokens(3)
    for version in range(1, commits + 1):
        update(server, versions, version, kv_cache=kv, **LIVE)
        until_made_by(generation, version)
    # without a commit, too, most tokens come by steps of decoding
    generation.wait_for_tokens(TOKENS)
    rollout = cut(generation, tmp_path)
    assert rollout.commits == commits
    assert rollout.retractions == (commits if kv == "recompute" else 0)
    verdict = replayed(stage, rollout)
    assert verdict.is_exact, str(verdict)


def test_age_bounded_rollout_is_made_again(
    server: Server, stage: Stage, versions: Path, tmp_path: Path
) -> None:
    generation = begin(server, ENDLESS)
    generation.wait_for_tokens(3)
    for version in (1, 2, 3):
        update(server, versions, version, kv_max_age=1, **LIVE)
        until_made_by(generation, version)
    rollout = cut(generation, tmp_path)
    assert rollout.commits == 3
    assert rollout.retractions == 1
    verdict = replayed(stage, rollout)
    assert verdict.is_exact, str(verdict)


def test_retracted_rollout_of_several_chunks_is_made_again(
    server: Server, stage: Stage, versions: Path, tmp_path: Path
) -> None:
    generation = begin(server, ENDLESS, input_ids=prompt(2 * CHUNK + 9))
    generation.wait_for_tokens(3)
    pause(server, "retract")
    update(server, versions, 1, kv_cache="keep", **LIVE)
    resume(server)
    more_tokens([generation])
    retract(server, [generation])
    rollout = cut(generation, tmp_path)
    assert (rollout.commits, rollout.retractions) == (1, 2)
    verdict = replayed(stage, rollout)
    assert verdict.is_exact, str(verdict)


def test_rollout_on_older_prefixes_is_made_again(
    server: Server, stage: Stage, versions: Path, tmp_path: Path
) -> None:
    long = prompt(3 * LENGTH)
    for version, length in ((0, LENGTH), (1, 2 * LENGTH), (2, None)):
        if version:
            update(server, versions, version, kv_cache="keep", **LIVE)
        if length is not None:
            ask(server, "POST", "/generate", generate(input_ids=long[:length])[1])
    generation = begin(server, ENDLESS, input_ids=long)
    generation.wait_for_tokens(3)
    update(server, versions, 3, kv_cache="keep", **LIVE)
    until_made_by(generation, 3)
    rollout = cut(generation, tmp_path)
    assert rollout.commits == 1
    assert [version for version, _, _ in rollout.prefix] == ["v0", "v1"]
    verdict = replayed(stage, rollout)
    assert verdict.is_exact, str(verdict)


def test_rollout_beside_others_has_the_same_tokens_when_made_alone(
    server: Server, stage: Stage, versions: Path, tmp_path: Path
) -> None:
    """A CPU's matrix products depend on the batch in their last bits."""
    others = start_running(server, 3, tokens=ENDLESS)
    generations = [begin(server, ENDLESS, DRAWN, prompt(LENGTH + i)) for i in range(3)]
    for generation in generations:
        generation.wait_for_tokens(3)
    update(server, versions, 1, kv_cache="recompute", **LIVE)
    for generation in generations:
        until_made_by(generation, 1)
    retract(server, generations)
    rollouts = [cut(generation, tmp_path) for generation in generations]
    for other in others:
        other.abort()
        other.wait_for_end()
    for rollout in rollouts:
        assert rollout.commits == 1
        verdict = examine(stage, rollout, [], 0.05).verdict
        assert verdict.is_equal, str(verdict)


def test_another_checkpoint_is_named(
    server: Server, stage: Stage, versions: Path, tmp_path: Path
) -> None:
    rollout = across_a_commit(server, versions, tmp_path)
    first = rollout.made_by[0].end
    stage._checkpoints["v1"] = str(versions / "v2")  # type: ignore[index]
    verdict = replayed(stage, rollout)
    assert verdict.first_apart is not None
    assert verdict.first_apart >= first
    assert "version 'v1' had other weights: digest" in str(verdict)


@pytest.mark.parametrize("by", [-1, 1])
def test_shifted_commit_is_named(
    server: Server, stage: Stage, versions: Path, tmp_path: Path, by: int
) -> None:
    rollout = across_a_commit(server, versions, tmp_path)
    (event,) = (event for event in rollout.record.events if event[0] == "commit")
    event[1] += by
    first = rollout.made_by[0].end
    verdict = replayed(stage, rollout)
    assert verdict.first_apart == first + min(by, 0)
    assert not verdict.is_equal


def test_log_probabilities_under_another_version(
    server: Server, stage: Stage, versions: Path, tmp_path: Path
) -> None:
    rollout = ended(begin(server, TOKENS, DRAWN), tmp_path)
    report = examine(stage, rollout, ["v0", "v2"], 0.0)
    assert report.verdict.is_exact
    (same,), (other,) = report.mismatches["v0"], report.mismatches["v2"]
    assert (same.version, same.tokens, same.largest) == ("v0", TOKENS, 0.0)
    assert other.mean > 0.1
    # the same as by a pin beside training
    update(server, versions, 2, kv_cache="recompute", **LIVE)
    update(server, versions, 1, kv_cache="recompute", **LIVE)
    custom = {"forced_token_ids": rollout.tokens, "weight_version": "v2"}
    body = {
        "input_ids": rollout.prompt,
        "sampling_params": {**DRAWN, "custom_params": custom},
        "return_logprob": True,
    }
    meta = ask(server, "POST", "/generate", body)["meta_info"]
    assert [logprob for logprob, *_ in meta["output_token_logprobs"]] == report.logprobs["v2"]


def test_seeded_rollout_is_sampled_again(pool: ServerPool, versions: Path, tmp_path: Path) -> None:
    server = pool.get(FLAVOURS["replay_seeded"])
    update(server, versions, 0, kv_cache="recompute")
    seeded = {"temperature": 1.0, "sampling_seed": 11}
    rollout = across_a_commit(server, versions, tmp_path, sampling=seeded)
    assert rollout.record.samples_alike
    for stage in make_stage(server, versions):
        verdict = replayed(stage, rollout)
        assert verdict.is_exact, str(verdict)
        other = {**rollout.record.sampling, "sampling_seed": 12}
        changed = dataclasses.replace(rollout, record=_replace(rollout.record, sampling=other))
        verdict = replayed(stage, changed)
        assert verdict.first is not None
        # the tokens were then given
        assert verdict.largest is not None
        assert verdict.largest.nats == 0
    pool.restore()


def _replace(record: Any, **fields: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(record, **fields)


def test_command_replays_a_folder(one_rank: Server, versions: Path, tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    folder.mkdir()
    for sampling in (GREEDY, DRAWN):
        across_a_commit(one_rank, versions, folder, sampling)
        update(one_rank, versions, 0, kv_cache="recompute", **LIVE)
    given = [
        argument
        for version in range(2)
        for argument in ("--checkpoint", f"v{version}={versions / f'v{version}'}")
    ]
    call = ["replay", str(folder), "--url", one_rank.url, *given]
    result = CliRunner().invoke(app, [*call, "--under", "v1", "--json"])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["exact"] for line in lines] == [True, True]
    assert all(
        {each["version"] for each in line["mismatch"]["v1"]} == {"v0", "v1"} for line in lines
    )
    (file, *_) = sorted(folder.iterdir())
    answer = json.loads(file.read_text())
    answer["output_ids"][2] ^= 1
    file.write_text(json.dumps(answer))
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 1
    assert "equal, bit for bit" in result.stdout
    result = CliRunner().invoke(app, call[:-2])
    assert result.exit_code == 1
    assert "no checkpoint for version 'v1'" in result.output


def _fork(command: list[str], *, env: dict[str, str], stdout: Any, stderr: int) -> Process:
    assert (command[0], stderr) == (sys.executable, subprocess.STDOUT)
    return start(command[1:], output=stdout, env=env)


@pytest.mark.parametrize("one_rank", ["replay_normal_loop"], indirect=True)
def test_command_starts_a_server_like_the_recorded_one(
    one_rank: Server,
    pool: ServerPool,
    versions: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop without overlap is no default, so the command has to pass it on."""
    across_a_commit(one_rank, versions, tmp_path, kv="recompute")
    # one server at a time
    pool.discard()
    # a fork has the imports and the plan of patches, which take a fresh process most of a minute
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": _fork})
    monkeypatch.setattr("sglang_inflight.extensions.replay.start.subprocess", forking)
    given = [f"--checkpoint=v{version}={versions / f'v{version}'}" for version in range(2)]
    # the tests' servers have their own; others would set memory aside
    more = ["--server-args", "--max-total-tokens 65536 --skip-server-warmup"]
    result = CliRunner().invoke(app, ["replay", str(tmp_path), *given, *more])
    assert result.exit_code == 0, result.output
    assert "equal, bit for bit" in result.stdout


def test_failed_repetition_leaves_the_server_serving(
    one_rank: Server, versions: Path, tmp_path: Path
) -> None:
    rollout = across_a_commit(one_rank, versions, tmp_path)
    paths = {"v0": str(versions / "v0"), "v1": str(tmp_path)}
    with Stage(one_rank.url, paths) as stage, pytest.raises(InflightError, match="cannot be read"):
        stage.play(rollout, forces=True)
    status = ask(one_rank, "GET", "/inflight/status")
    assert not status["paused"]
    until("nothing runs", lambda: ask(one_rank, "GET", "/inflight/status")["running"] == 0)


def test_dead_replay_leaves_the_server_serving(one_rank: Server) -> None:
    """A script's pause is an ordinary one, which anybody may release."""
    script = {"pauses": [[0, LENGTH + 5]]}
    custom = {"record": "replay", "replay": script}
    generation = Generation(
        one_rank, tokens=50, input_ids=prompt(LENGTH), sampling={"custom_params": custom}
    )
    status = until(
        "it pauses", lambda: [s for s in [ask(one_rank, "GET", "/inflight/status")] if s["paused"]]
    )
    (holder,) = status[0]["holders"]
    assert holder["pause_id"] == "replay"
    assert holder["lease_left_s"] > 0
    until("its tokens have come", lambda: generation.count == 6)
    assert settle(one_rank, [generation]) == [6]
    resume(one_rank)
    assert len(generation.output().tokens) == 50


@pytest.mark.parametrize(
    ("custom", "words"),
    [
        ({"replay": {}}, ("needs record",)),
        ({"replay": 3, "record": "replay"}, ("custom_params.replay",)),
        ({"replay": {"pauses": [[0, -1]]}, "record": "replay"}, ("custom_params.replay",)),
        ({"record": "all"}, ('must be "replay"',)),
    ],
)
def test_wrong_script_is_refused(
    one_rank: Server, custom: dict[str, Any], words: tuple[str, ...]
) -> None:
    expect_refusal(one_rank, *generate(sampling={"custom_params": custom}), *words)


def score(server: Server, input_ids: list[int], start: int = 0, **custom: Any) -> Any:
    """Return ``meta_info`` of a prompt's log probabilities, without a new token."""
    body = {
        "input_ids": input_ids,
        "sampling_params": {"max_new_tokens": 0, "custom_params": custom},
        "return_logprob": True,
        "logprob_start_len": start,
    }
    return ask(server, "POST", "/generate", body)["meta_info"]


def logprobs_of(meta: Any) -> list[float]:
    return [logprob for logprob, *_ in meta["input_token_logprobs"]]


def test_prompts_log_probabilities_belong_to_the_versions_of_kv(
    one_rank: Server, versions: Path
) -> None:
    """Position p has the log probability of the token behind it, by the weights of its KV."""
    from concurrent.futures import ThreadPoolExecutor

    long = prompt(2 * CHUNK)
    by_first = logprobs_of(score(one_rank, long))
    with ThreadPoolExecutor() as threads:
        script = {"pauses": [[0, CHUNK]]}
        asked = threads.submit(score, one_rank, long, record="replay", replay=script)
        until("it pauses", lambda: ask(one_rank, "GET", "/inflight/status")["paused"])
        update(one_rank, versions, 1, kv_cache="keep", **LIVE)
        resume(one_rank)
        mixed = asked.result()
    spans = [(span["version"], span["start"], span["end"]) for span in mixed["kv_versions"]]
    assert spans == [("v0", 0, CHUNK), ("v1", CHUNK, 2 * CHUNK)]
    # the first token has none
    assert logprobs_of(mixed)[1 : CHUNK + 1] == by_first[1 : CHUNK + 1]
    # the first half's KV is in the cache
    rest = score(one_rank, long, CHUNK)
    assert rest["cached_tokens"] == CHUNK
    assert logprobs_of(mixed)[CHUNK + 1 :] == logprobs_of(rest)[1:]
    # a pin makes all of them by one version
    pinned = score(one_rank, long, weight_version="v0")
    assert logprobs_of(pinned)[1:] == by_first[1:]
    assert {span["version"] for span in pinned["kv_versions"]} == {"v0"}

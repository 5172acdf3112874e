"""Seeds decide tokens, on a server that heeds seeds. At temperature 100 each token is as likely."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.server import Server
from tests.support.load import ask, pause, resume, start, start_running, update
from tests.support.plugins import with_plugin
from tests.support.pool import FLAVOURS, Flavour, ServerPool

FLAVOURS["seeded"] = Flavour(
    ("--enable-deterministic-inference", "--attention-backend", "torch_native",
     "--max-running-requests", "16", "--weight-version", "v0"),
    {"SGLANG_INFLIGHT_VLLM_ROUTES": "1", **with_plugin("seeded")},
)  # fmt: skip
HOT = {"temperature": 100.0, "ignore_eos": True, "max_new_tokens": 16}
PROMPT = [5, 6, 7]
LONG = 160


@pytest.fixture
def seeded(pool: ServerPool) -> Iterator[Server]:
    yield pool.get(FLAVOURS["seeded"])
    pool.restore()


def sample(server: Server, **sampling: Any) -> list[dict[str, Any]]:
    answer = ask(
        server, "POST", "/generate", {"input_ids": PROMPT, "sampling_params": HOT | sampling}
    )
    return answer if isinstance(answer, list) else [answer]


def tokens_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def seeds_of(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["meta_info"]["sampling_seed"] for answer in answers]


def test_samples_of_a_request_differ(seeded: Server) -> None:
    group = sample(seeded, n=4, sampling_seed=7)
    assert seeds_of(group) == [7, 8, 9, 10]
    tokens = tokens_of(group)
    assert len({tuple(each) for each in tokens}) == 4
    for seed, expected in zip(seeds_of(group), tokens, strict=True):
        assert tokens_of(sample(seeded, sampling_seed=seed)) == [expected]


def test_samples_of_each_prompt_of_a_batch_count_anew(seeded: Server) -> None:
    body = {
        "input_ids": [PROMPT, PROMPT],
        "sampling_params": [HOT | {"n": 2, "sampling_seed": seed} for seed in (7, 100)],
    }
    assert seeds_of(ask(seeded, "POST", "/generate", body)) == [7, 8, 100, 101]


def test_requests_without_a_seed_differ(seeded: Server) -> None:
    answers = [sample(seeded)[0] for _ in range(4)]
    assert len({tuple(each) for each in tokens_of(answers)}) == 4
    again = sample(seeded, sampling_seed=seeds_of(answers)[2])
    assert tokens_of(again) == [answers[2]["output_ids"]]


def test_samples_without_a_seed_differ(seeded: Server) -> None:
    group = sample(seeded, n=3)
    first = seeds_of(group)[0]
    assert seeds_of(group) == [first, first + 1, first + 2]
    assert len({tuple(each) for each in tokens_of(group)}) == 3


def test_last_seed_has_a_next_one(seeded: Server) -> None:
    last = (1 << 63) - 1
    assert seeds_of(sample(seeded, n=2, sampling_seed=last)) == [last, 0]


def test_samples_on_openais_and_vllms_routes_differ(seeded: Server) -> None:
    body = {"model": "default", "prompt": PROMPT, "n": 3, "seed": 7, "temperature": 100.0}
    choices = ask(seeded, "POST", "/v1/completions", body | {"max_tokens": 8})["choices"]
    assert len({choice["text"] for choice in choices}) == 3
    sampling = {"n": 3, "seed": 7, "temperature": 100.0, "max_tokens": 8}
    body = {"token_ids": PROMPT, "sampling_params": sampling}
    choices = ask(seeded, "POST", "/inference/v1/generate", body)["choices"]
    expected = [tokens[:8] for tokens in tokens_of(sample(seeded, n=3, sampling_seed=7))]
    assert [choice["token_ids"] for choice in choices] == expected


def test_seed_decides_tokens_across_retractions(seeded: Server, checkpoints: Path) -> None:
    request: dict[str, Any] = {
        "tokens": LONG,
        "input_ids": PROMPT,
        "sampling": {"temperature": 100.0, "sampling_seed": 3},
    }
    (alone,) = start(seeded, 1, **request)
    expected = alone.output().tokens
    (generation,) = start_running(seeded, 1, **request)
    pause(seeded, "retract")
    resume(seeded)
    update(seeded, checkpoints, 0, kv_cache="recompute", non_blocking=True)
    output = generation.output()
    assert output.meta["num_retractions"] >= 1
    assert output.tokens == expected


def test_ignored_seed_is_logged_once(server: Server) -> None:
    """The server without --enable-deterministic-inference ignores seeds, as SGLang does."""
    before = server.log_text().count("A request's seed is ignored")
    for _ in range(2):
        body = {"input_ids": PROMPT, "sampling_params": {"sampling_seed": 5, "max_new_tokens": 1}}
        answer = ask(server, "POST", "/generate", body)
        assert "sampling_seed" not in answer["meta_info"]
    assert before in (0, 1)
    assert server.log_text().count("A request's seed is ignored") == 1

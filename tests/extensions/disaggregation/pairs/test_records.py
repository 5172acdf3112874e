"""Routes in a decode server's answer: those of the prompt are the prefill server's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import routed
from tests.support.load import pause, prompt, resume
from tests.support.pair import Pair, serve_pair
from tests.support.records import SERVING, ask_for_routes, routes_of, single_version

PROMPT_TOKENS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routed")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return routed.build(folder / "v0", 0)


@pytest.fixture(scope="module")
def pair(model: Path, folder: Path) -> Iterator[Pair]:
    with serve_pair(model, *SERVING, "--weight-version", "v0", folder=folder) as pair:
        yield pair


def test_decode_server_returns_only_routes_of_its_own_forwards(
    pair: Pair, model: Path, tmp_path: Path
) -> None:
    """A retraction in between keeps them."""
    ids = prompt(PROMPT_TOKENS)
    # rows of other requests in the same slots
    pair.generate(tokens=40, return_routed_experts=True).output()
    generation = pair.generate(tokens=500, input_ids=ids, return_routed_experts=True)
    generation.wait_for_tokens(10)
    pause(pair.decode, "retract")
    resume(pair.decode)
    generation.wait_for_tokens(generation.count + 10)
    generation.abort()
    output = generation.output()
    assert output.meta["num_retractions"] == 1
    rows = routes_of(output.meta)
    assert len(rows) == PROMPT_TOKENS + len(output.tokens) - 1
    with single_version(model, tmp_path / "alone.log") as alone:
        expected = ask_for_routes(alone, ids + output.tokens[:-1])
    assert (rows[:PROMPT_TOKENS] == -1).all()
    assert rows[PROMPT_TOKENS:].tolist() == expected[PROMPT_TOKENS:]
    assert routes_of(generation.prefill.output().meta).tolist() == expected[:PROMPT_TOKENS]


def test_recomputed_routes_of_a_decode_server_are_refused(pair: Pair) -> None:
    wanted: dict[str, Any] = {"max_new_tokens": 2, "custom_params": {"records": "recomputed"}}
    body = {
        "input_ids": prompt(),
        "sampling_params": wanted,
        "return_routed_experts": True,
        **pair.meeting(),
    }
    answer = pair.decode.post("/generate", body)
    assert answer["status_code"] == 400, answer
    assert "recomputed" in str(answer)

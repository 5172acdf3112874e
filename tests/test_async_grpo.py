"""The example of asynchronous GRPO trains by two ways on a real server, and writes its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.async_grpo.__main__ import main
from tests.support.examples import run
from tests.support.pool import ServerPool

# the base model has learned nothing, so its answers are long
SMALL = (
    *("--teaching", "2", "--seconds", "600", "--steps", "2"),
    *("--groups", "2", "--group-size", "3"),
)
# an answer is made again alone, so each of its tokens takes a step of its own
REPLAYS = 5


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the base model, which is taught once."""
    return tmp_path_factory.mktemp("cache")


def test_sharded_sender_of_the_example_sends_what_it_trains(
    pool: ServerPool, tmp_path: Path, cache: Path
) -> None:
    pool.discard()
    out = tmp_path / "out"
    run(
        *(tmp_path, "async_grpo", "--out", str(out), "--cache", str(cache)),
        *(*SMALL, "--way", "in flight", "--sharded", "--replays", "0"),
    )
    (result,) = json.loads((out / "results.json").read_text())["results"]
    assert result["labels"]["mislabelled"] == 0
    assert result["labels"]["tokens"] > 0
    assert len(result["steps"]) == 2


def test_changed_elements_are_not_sent_by_a_sharded_sender(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--sharded", "--way", "in flight, sparse"])
    assert "in flight, sparse" in capsys.readouterr().err


def test_async_grpo_example_trains_and_reports(
    pool: ServerPool, tmp_path: Path, cache: Path
) -> None:
    # its server and trainer would share the cores
    pool.discard()
    out = tmp_path / "out"
    lines = run(
        *(tmp_path, "async_grpo", "--out", str(out), "--cache", str(cache)),
        *(*SMALL, "--way", "blocking", "--way", "in flight", "--replays", str(REPLAYS)),
    )
    assert any("logprobs off by" in line for line in lines)
    assert "data:image/png;base64," in (out / "index.html").read_text()
    results = json.loads((out / "results.json").read_text())["results"]
    assert [result["way"] for result in results] == ["blocking", "in flight"]
    for result in results:
        assert result["labels"]["mislabelled"] == 0
        assert result["labels"]["tokens"] > 0
        assert result["tokens_made"] >= result["tokens_trained"] > 0
        assert result["tokens_thrown_away"] == 0
        assert sum(result["ages"].values()) == result["tokens_trained"]
        assert len(result["steps"]) == 2
        assert len(result["curve"]) == 3
        assert result["replayed"]["rollouts"] == result["replayed"]["equal"] == REPLAYS
        assert result["mismatch"]["0"] < 1e-3
    assert results[0]["ages"].keys() == {"0"}

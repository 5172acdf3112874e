"""Each example does what it promises, on the tests' models."""

from __future__ import annotations

from pathlib import Path

from harness import marker
from harness.server import Server
from tests.support.examples import run
from tests.support.load import ENDLESS, more_tokens, start_running, status, versions_of
from tests.support.pool import ServerPool
from tests.support.updates import expect_served


def test_hello_example_updates_under_a_request(
    server: Server, checkpoints: Path, tmp_path: Path
) -> None:
    update, *tokens = [
        line
        for line in run(
            *(tmp_path, "hello", "--url", server.url, "--model-path", str(checkpoints / "v1")),
            *("--weight-version", "v1"),
        )
        if line.startswith(("v0", "token"))
    ]
    assert update == "v0 -> v1"
    made_by = [f"token {marker.token(version)} by v{version}" for version in (0, 1)]
    assert tokens == sorted(tokens)
    assert set(tokens) == set(made_by)
    assert tokens.count(made_by[1]) >= 10
    expect_served(server, 1)


def test_trainer_example_makes_each_step_a_version(
    server: Server, checkpoints: Path, tmp_path: Path
) -> None:
    """Requests run through all steps."""
    before = status(server)
    generations = start_running(server, 2, tokens=ENDLESS)
    lines = run(
        *(tmp_path, "trainer", "--url", server.url, "--model-path", str(checkpoints / "v0")),
        # a change too small to change the model's tokens
        *("--steps", "2", "--learning-rate", "0.1", "--text", " ".join(["t150"] * 8)),
    )
    steps = [line for line in lines if line.startswith("step-")]
    assert [line.split(":")[0] for line in steps] == ["step-1", "step-2"]
    more_tokens(generations)
    after = status(server)
    assert after["epoch"] == before["epoch"] + 2
    assert after["digest"] != before["digest"]
    for generation in generations:
        generation.abort()
        output = generation.output()
        assert versions_of(output) == ["v0", "step-1", "step-2"]
        assert set(output.tokens) == {marker.token(0)}


def test_engine_example_updates_and_rolls_back(
    pool: ServerPool, checkpoints: Path, tmp_path: Path
) -> None:
    # an engine's ranks and a server's would share the cores
    pool.discard()
    old, new = str(checkpoints / "v0"), str(checkpoints / "v1")
    lines = run(tmp_path, "engine", "--model-path", old, "--new", new)
    spans = [line for line in lines if line.startswith(("threads:", "loop:"))]
    assert [line.split(" by ")[1] for line in spans] == ["old", "new", "new", "old"]
    assert "old -> new" in lines
    assert "new -> old" in lines

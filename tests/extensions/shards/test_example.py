"""The example of a sharded trainer makes each step a version of two servers."""

from __future__ import annotations

from pathlib import Path

from harness import marker
from harness.server import Server
from tests.support.examples import run
from tests.support.load import ENDLESS, more_tokens, start_running, status, versions_of

pytest_plugins = ["tests.support.fixtures"]


def test_sharded_example_makes_each_step_a_version(
    tp2_server: Server, checkpoints: Path, tmp_path: Path
) -> None:
    """Requests run through all steps."""
    before = status(tp2_server)
    generations = start_running(tp2_server, 2, tokens=ENDLESS)
    lines = run(
        *(tmp_path, "sharded", "--url", tp2_server.url, "--model-path", str(checkpoints / "v0")),
        # a change too small to change the model's tokens
        *("--steps", "2", "--learning-rate", "0.1", "--text", " ".join(["t150"] * 8)),
        processes=2,
    )
    steps = [line.split(" at ")[0] for line in lines if line.startswith("step-")]
    assert steps == ["step-1", "step-2"]
    more_tokens(generations)
    after = status(tp2_server)
    assert after["epoch"] == before["epoch"] + 2
    assert after["digest"] != before["digest"]
    for generation in generations:
        generation.abort()
        output = generation.output()
        assert versions_of(output) == ["v0", "step-1", "step-2"]
        assert set(output.tokens) == {marker.token(0)}

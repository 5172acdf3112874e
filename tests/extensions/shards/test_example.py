"""The example of a sharded trainer makes each step a version of two servers."""

from __future__ import annotations

from pathlib import Path

from harness import marker
from harness.server import Server, serve
from tests.support.examples import TIMEOUT_S, run
from tests.support.load import (
    ENDLESS,
    more_tokens,
    pause,
    resume,
    start_running,
    status,
    until,
    versions_of,
)
from tests.support.updates import Call, staging

pytest_plugins = ["tests.support.fixtures"]


def test_sharded_example_makes_each_step_a_version_of_both_servers(
    tp2_server: Server, checkpoints: Path, tmp_path: Path
) -> None:
    """Requests run through all steps. The second server has one rank."""
    folder = checkpoints / "v0"
    with serve(folder, "--weight-version", "v0", log=tmp_path / "log") as second:
        servers = (tp2_server, second)
        before = [status(server) for server in servers]
        generations = [start_running(server, 2, tokens=ENDLESS) for server in servers]
        # the requests would end before a slow start of the trainer does
        for server in servers:
            pause(server, "in_place")

        def train() -> dict[str, list[str]]:
            lines = run(
                *(tmp_path, "sharded", "--url", servers[0].url, "--url", servers[1].url),
                # a change too small to change the model's tokens
                *("--model-path", str(folder), "--steps", "2", "--learning-rate", "0.1"),
                *("--text", " ".join(["t150"] * 8)),
                processes=2,
            )
            return {"lines": lines}

        training = Call.of(train)
        for server in servers:
            until(
                "the trainer joins",
                lambda server=server: staging(server)[0]["groups"],  # type: ignore[misc]
                patience_s=TIMEOUT_S,
            )
            resume(server)
        lines = training.answer()["lines"]
        steps = [line.split(":")[0] for line in lines if line.startswith("step-")]
        assert steps == ["step-1 at http"] * 2 + ["step-2 at http"] * 2
        for server, was, running in zip(servers, before, generations, strict=True):
            more_tokens(running)
            now = status(server)
            assert now["epoch"] == was["epoch"] + 2
            assert now["digest"] != was["digest"]
            for generation in running:
                generation.abort()
                output = generation.output()
                assert versions_of(output) == ["v0", "step-1", "step-2"]
                assert set(output.tokens) == {marker.token(0)}

"""The README's commands and code do what it says, on the tests' models."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from harness import marker
from harness.server import AS_USERS_DO_IN_A_FORK, Server, serve
from tests.support import readme
from tests.support.examples import run
from tests.support.load import ENDLESS, Generation, more_tokens, start_running, versions_of
from tests.support.pool import ServerPool


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo_fails_a_check_of_its_own(pool: ServerPool, tmp_path: Path) -> None:
    pool.discard()
    lines = run(tmp_path, "stories")
    assert any("✓ every token has its version" in line for line in lines)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the README's command is curl's")
def test_readmes_update_reaches_a_request_of_its_server(
    checkpoints: Path, pool: ServerPool, tmp_path: Path
) -> None:
    """Folders and the port are the test's. ``tests/test_plugin_start.py`` starts it as users do."""
    pool.discard()  # one server at a time
    program, serves, option, _, *flags = readme.command("sglang serve")
    assert (program, serves, option) == ("sglang", "serve", "--model-path")
    log, by = tmp_path / "log", AS_USERS_DO_IN_A_FORK
    with serve(checkpoints / "v0", *flags, log=log, command=by) as server:
        running = start_running(server, 2, tokens=ENDLESS)
        words = [
            word.replace("localhost:30000", server.url).replace(
                "/ckpt/step-42", str(checkpoints / "v1")
            )
            for word in readme.command("curl")
        ]
        answer = subprocess.run(words, check=True, capture_output=True, text=True, timeout=240)
        receipt = json.loads(answer.stdout)
        assert receipt["success"], receipt
        assert (receipt["base_version"], receipt["weight_version"]) == ("0", "42")
        expect_made_by(running, ["0", "42"])


def expect_made_by(running: list[Generation], names: list[str]) -> None:
    """Check that the requests go on, with a token of each version, the marker's v0, v1, …"""
    more_tokens(running)
    made = [marker.token(version) for version in range(len(names))]
    for generation in running:
        generation.abort()
        output = generation.output()
        assert versions_of(output) == names
        assert list(dict.fromkeys(output.tokens)) == made


class Model:
    """The marker model, whose training makes the next version of it."""

    version = 0

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        return marker.tensors(self.version).items()


def train(model: Model) -> None:
    model.version += 1


def test_readmes_trainer_makes_each_step_a_version(server: Server) -> None:
    running = start_running(server, 2, tokens=ENDLESS)
    code = readme.code(
        " Sender(client)",
        {"http://localhost:30000": server.url, "range(43, 100)": "range(43, 46)"},
    )
    exec(code, {"model": Model(), "train": train})
    expect_made_by(running, ["v0", "43", "44", "45"])

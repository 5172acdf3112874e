"""The client's distribution: in an environment without SGLang, and of another version."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.server import Server
from harness.starting import ROOT
from sglang_inflight.client import Client
from sglang_inflight.client import answers as client_answers
from sglang_inflight.vocabulary.errors import NotOffered
from sglang_inflight.vocabulary.version import VERSION
from tests.support.load import status

# a trainer's, and none of SGLang's
TRANSFORMERS = "transformers==4.57.1"
TRAINER = """
import json, sys
from importlib.metadata import distributions
from sglang_inflight.client import Client

url, checkpoint = sys.argv[1:]
with Client(url) as client:
    receipt = client.update_from_disk(checkpoint, weight_version="v1")
names = {each.name: each.version for each in distributions()}
print(json.dumps({"receipt": receipt.as_json(), "names": names, "modules": [*sys.modules]}))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the client, and another transformers than SGLang's."""
    folder = tmp_path_factory.mktemp("trainer")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=240)
    python = folder / "bin" / "python"
    # few of the installed modules are ever imported, and compiling all takes most of the time
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--no-compile")
    subprocess.run([*pip, "--quiet", "--no-deps", TRANSFORMERS], check=True, timeout=240)
    subprocess.run([*pip, "--quiet", "./client"], cwd=ROOT, check=True, timeout=240)
    return python


def test_trainer_without_sglang_and_torch_updates_a_server(
    server: Server, checkpoints: Path, python: Path, tmp_path: Path
) -> None:
    command = [str(python), "-c", TRAINER, server.url, str(checkpoints / "v1")]
    done = subprocess.run(
        command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["receipt"]["weight_version"] == status(server)["weight_version"] == "v1"
    names = said["names"]
    assert names["sglang-inflight-client"] == VERSION
    assert f"transformers=={names['transformers']}" == TRANSFORMERS
    assert not {"sglang", "sglang-inflight", "torch"} & {*names, *said["modules"]}


def test_command_without_sglang_updates_a_server(
    server: Server, checkpoints: Path, python: Path
) -> None:
    command = [str(python.with_name("sglang-inflight")), "update", "disk"]
    subprocess.run(
        [*command, str(checkpoints / "v1"), "--url", server.url, "--weight-version", "v1"],
        check=True,
        timeout=240,
    )
    assert status(server)["weight_version"] == "v1"


# takes the turn of the other tests, because the environment would be made again for another turn
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("name", ["doctor", "fork"])
def test_command_of_the_server_names_the_distribution_that_is_missing(
    python: Path, name: str, tmp_path: Path
) -> None:
    command = [str(python.with_name("sglang-inflight")), name]
    done = subprocess.run(
        [*command, *([str(tmp_path / "fork")] if name == "fork" else [])],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "sglang-inflight" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.pause("in_place"),
        lambda client: client.roll_back(),
        lambda client: client.status(),
    ],
    ids=["pause", "roll_back", "status"],
)
def test_client_of_another_version_says_so_and_sends_nothing(
    server: Server, call: Callable[[Client], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = status(server)
    monkeypatch.setattr(client_answers, "VERSION", "0.99.0")
    with (
        Client(server.url) as client,
        pytest.raises(NotOffered, match=rf"sglang-inflight-client 0\.99\.0, .* {VERSION}: install"),
    ):
        call(client)
    assert status(server) == before

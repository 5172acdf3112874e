"""AReaL's whole trainer in front of two servers, as it is and in flight."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from harness import marker
from harness.server import Server, serve
from harness.starting import ROOT, end, on_path
from tests.support.load import ask, status, until
from tests.support.replay import Replay
from tests.trainers.areal.train import BATCHES, GENERATIONS, VERSIONS, Mode, Order
from tests.trainers.environment import python_of

Way = Literal["as_is", "in_flight"]

# a run of the trainer takes half a minute, so some tests take one of the four combinations a way
ONE_MODE: dict[Way, Mode] = {"as_is": "xccl", "in_flight": "disk"}
OTHER_MODE: dict[Way, Mode] = {"as_is": "disk", "in_flight": "xccl"}

STEPS = 4
TOKENS = 300
# longer than any restart of a trainer here, in which a server would begin to hold requests
GRACE = {"SGLANG_INFLIGHT_TRANSPARENT": "1", "SGLANG_INFLIGHT_TRANSPARENT_GRACE_S": "600"}
# a trainer's own imports take as long as a server's start on busy cores
PATIENCE_S = 280
TOLERANCE = 2e-3


@dataclass
class Servers:
    servers: list[Server]
    way: Way

    def restore(self, model: Path) -> None:
        """Serve ``model``, and end what a killed trainer has left."""
        for server in self.servers:
            # refused if the killed trainer's update was dropped, which ends it as well
            server.post("/continue_generation", {})
            ask(server, "POST", "/update_weights_from_disk", {"model_path": str(model)})

    def epochs(self) -> dict[str, int]:
        """Return each server's epoch, by its host and port."""
        return {_address(server): status(server)["epoch"] for server in self.servers}


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of("areal")


@pytest.fixture(scope="module")
def models(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A marker, and a model of its shapes whose training changes what it says."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    fields = {k: v for k, v in marker.CONFIG.items() if k not in ("architectures", "model_type")}
    fields |= {"torch_dtype": "float32", "initializer_range": 0.1}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**fields), dtype=torch.float32)
    config = {**marker.CONFIG, "torch_dtype": "float32"}
    return {
        "marker": marker.build(folder / "marker", 0),
        "trainable": marker.write(folder / "trainable", model.state_dict(), config),
    }


@pytest.fixture(scope="module", params=["as_is", "in_flight"])
def servers(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Servers]:
    logs = tmp_path_factory.mktemp("servers")
    env = GRACE if request.param == "in_flight" else {}
    with contextlib.ExitStack() as stack:
        pair = [
            stack.enter_context(
                serve(models["marker"], "--dtype", "float32", log=logs / f"{index}.log", env=env)
            )
            for index in range(2)
        ]
        yield Servers(pair, request.param)


def _address(server: Server) -> str:
    return server.url.removeprefix("http://")


def train(python: Path, order: Order) -> int:
    """Run the trainer to its end, and return its exit code."""
    folder = Path(order.folder)
    folder.mkdir(exist_ok=True)
    env = {**os.environ, **on_path(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "trainer.log").open("ab") as log:
        process = subprocess.Popen(
            [python, "-m", "tests.trainers.areal.train", json.dumps(asdict(order))],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=env,
            process_group=0,
        )
        try:
            return process.wait(PATIENCE_S)
        finally:
            end(process)


def order(servers: Servers, model: Path, folder: Path, **more: Any) -> Order:
    return Order(
        model=str(model),
        servers=[_address(server) for server in servers.servers],
        folder=str(folder),
        **{"steps": STEPS, "max_new_tokens": TOKENS, **more},
    )


def expect_trained(python: Path, order: Order) -> None:
    code = train(python, order)
    assert code == 0, (Path(order.folder) / "trainer.log").read_text()[-4000:]


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def made_by(answer: dict[str, Any], of: str, begin: int) -> list[int]:
    """Return the trainer's version of each token or position, if epoch ``begin`` is version 0."""
    return [span["epoch"] - begin for span in answer[of] for _ in range(span["start"], span["end"])]


def expect_no_rollout_lost_or_twice(order: Order) -> None:
    """Check that each step trained on whole prompts, each of them once."""
    folder = Path(order.folder)
    generated = Counter(
        tuple(note["prompt"] + note["tokens"]) for note in read(folder, GENERATIONS)
    )
    trained = [tuple(each) for note in read(folder, BATCHES) for each in note["sequences"]]
    assert not Counter(trained) - generated
    of_prompts = Counter(each[0] for each in trained)
    assert len(of_prompts) == order.steps * order.batch_size
    assert set(of_prompts.values()) == {order.n_samples}
    # its queue holds what it has not trained on; it takes the oldest first
    left = set(note["prompt"][0] for note in read(folder, GENERATIONS)) - set(of_prompts)
    assert all(prompt > max(of_prompts) - order.batch_size for prompt in left)
    assert {len(each) for each in trained} == {4 + order.max_new_tokens}


def expect_true_versions(servers: Servers, order: Order, begin: dict[str, int]) -> None:
    """Compare the versions that AReaL notes for tokens, ours, and the marker's tokens."""
    mixed = 0
    for note in read(Path(order.folder), GENERATIONS):
        by_marker = [token - marker.FIRST for token in note["tokens"]]
        ours: list[int] = []
        for answer in note["answers"]:
            ours += made_by(answer, "weight_versions", begin[note["server"]])
        assert ours == by_marker
        if servers.way == "as_is":
            assert note["versions"] == ours
        # in flight AReaL may note the next version: an answer that ends at the commit can reach it
        # after it has counted the commit
        assert all(0 <= said - true <= 1 for said, true in zip(note["versions"], ours, strict=True))
        mixed += len(set(ours)) > 1
    assert mixed, "no rollout was under way at an update"


@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("mode", ["disk", "xccl"])
def test_tokens_have_the_versions_that_the_trainer_notes(
    python: Path, servers: Servers, models: dict[str, Path], tmp_path: Path, mode: Mode
) -> None:
    servers.restore(models["marker"])
    begin = servers.epochs()
    run = order(servers, models["marker"], tmp_path / "run", mode=mode, marker=True)
    expect_trained(python, run)
    # one commit a step, on each server
    assert servers.epochs() == {address: epoch + STEPS for address, epoch in begin.items()}
    expect_no_rollout_lost_or_twice(run)
    expect_true_versions(servers, run, begin)


@pytest.mark.timeout(2 * PATIENCE_S)
def test_logprobs_are_those_of_transformers_with_the_named_weights(
    python: Path, servers: Servers, models: dict[str, Path], tmp_path: Path
) -> None:
    """AReaL's PPO trains, and its saved weights compute each token's log-probability again."""
    servers.restore(models["trainable"])
    begin = servers.epochs()
    folder = tmp_path / "run"
    mode = ONE_MODE[servers.way]
    run = order(servers, models["trainable"], folder, mode=mode, max_new_tokens=120)
    expect_trained(python, run)
    expect_no_rollout_lost_or_twice(run)
    versions = {
        str(version): folder / f"v{version}" if version else models["trainable"]
        for version in range(STEPS + 1)
    }
    replay = Replay(versions)
    notes = read(folder, GENERATIONS)
    used: set[int] = set()
    for note in notes:
        context, logprobs = list(note["prompt"]), list(note["logprobs"])
        for answer in note["answers"]:
            tokens, epoch = answer["tokens"], begin[note["server"]]
            weights = made_by(answer, "weight_versions", epoch)
            kv = made_by(answer, "kv_versions", epoch)
            found = replay.logprobs(context, tokens, _names(weights), _names(kv)) if tokens else []
            said, logprobs = logprobs[: len(tokens)], logprobs[len(tokens) :]
            assert said == pytest.approx(found, abs=TOLERANCE)
            context += tokens
            used |= set(weights)
    assert len(used) > 2


@pytest.mark.timeout(3 * PATIENCE_S)
def test_new_trainer_updates_after_one_that_was_killed_in_an_update(
    python: Path, servers: Servers, models: dict[str, Path], tmp_path: Path
) -> None:
    """In flight the servers serve meanwhile. As it is, they wait for the new trainer."""
    servers.restore(models["marker"])
    folder = tmp_path / "run"
    mode = OTHER_MODE[servers.way]
    killed = order(servers, models["marker"], folder, mode=mode, marker=True, dies_in=2)
    assert train(python, killed) == -signal.SIGKILL
    assert [note["version"] for note in read(folder, VERSIONS)] == [1]
    for server in servers.servers:
        until("the killed update is dropped", functools.partial(_staged_nothing, server))
        assert status(server)["paused"] == (servers.way == "as_is")
        if servers.way == "in_flight":
            assert says(server) == [marker.token(1)] * 3
    for notes in (GENERATIONS, BATCHES, VERSIONS):
        (folder / notes).unlink()
    again = order(servers, models["marker"], folder, mode=mode, marker=True)
    expect_trained(python, again)
    # its first update, of its checkpoint, comes before it notes any
    assert [note["version"] for note in read(folder, VERSIONS)] == [2, 3, 4]
    for server in servers.servers:
        assert says(server) == [marker.token(STEPS)] * 3
        assert not status(server)["paused"]
    for note in read(folder, GENERATIONS):
        assert set(note["versions"]) <= {1, 2, 3, 4}


def _names(versions: Sequence[int]) -> list[str]:
    return [str(version) for version in versions]


def _staged_nothing(server: Server) -> bool:
    return all(rank["staging"]["state"] == "empty" for rank in status(server)["ranks"])


def says(server: Server) -> list[int]:
    body = {
        "input_ids": [7, 8, 9],
        "sampling_params": {"max_new_tokens": 3, "temperature": 0.0},
    }
    tokens: list[int] = ask(server, "POST", "/generate", body)["output_ids"]
    return tokens

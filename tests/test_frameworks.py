"""The calls of RL frameworks' own clients, with SGLang's pauses and in transparent mode."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from harness import marker
from harness.server import PLAIN, Server
from harness.trainer import Trainers
from tests.support.frameworks import FRAMEWORKS, ONLY_WITH_PAUSES, Client, Framework
from tests.support.load import (
    ENDLESS,
    Generation,
    Output,
    settle,
    start_running,
    until,
)
from tests.support.updates import (
    expect_served,
    refuse,
)

pytest_plugins = ["tests.support.fixtures"]


EVERY = FRAMEWORKS | ONLY_WITH_PAUSES


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    return FRAMEWORKS[request.param]


def expect_epochs(output: Output) -> None:
    """Check that each span holds one version's tokens, with or without a version name."""
    spans = output.meta["weight_versions"]
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans)][:-1]
    assert spans[-1]["end"] == len(output.tokens)
    made = [set(output.tokens[span["start"] : span["end"]]) for span in spans]
    assert all(len(tokens) == 1 for tokens in made), (spans, made)
    assert len({span["epoch"] for span in spans}) == len(spans)


def expect_whole_update(
    server: Server, framework: Framework, running: list[Generation], retractions: int | None
) -> None:
    """Check that requests survived the update, or were aborted, as the mode says."""
    old, new = marker.token(0), marker.token(1)
    for generation in running:
        if framework.mode != "abort":
            until("tokens of the new weights", lambda g=generation: g.tokens[-3:] == [new] * 3)  # type: ignore[misc]
            assert not generation.has_ended
            generation.abort()
        output = generation.output()
        assert output.finish_reason == "abort", output.meta
        assert set(output.tokens) == ({old} if framework.mode == "abort" else {old, new})
        expect_epochs(output)
        if retractions is not None:
            assert output.meta["num_retractions"] == retractions
    expect_served(server, 1)


@pytest.mark.parametrize("name", EVERY)
def test_framework_update_goes_live_with_real_pauses(
    server: Server, name: str, checkpoints: Path, trainers: Trainers
) -> None:
    framework = EVERY[name]
    client = Client(server, framework, checkpoints, trainers)
    with client.connected():
        running = start_running(server, 3, tokens=ENDLESS)
        answer = client.pause()
        assert answer["paused"] is True
        settle(server, running)
        waiting = Generation(server, tokens=3)
        client.begin()
        client.send(1, "v1")
        answer = client.finish("v1")
        assert (answer["status_code"], answer["paused"]) == (200, False), answer
        retracts = framework.mode == "retract"
        expect_whole_update(server, framework, running, int(retracts))
        # accepted in the pause, and started after it
        after = [] if framework.aborts_waiting_requests else [marker.token(1)] * 3
        assert waiting.output().tokens == after
    named = "v1" if framework.names else "v0"
    assert server.get("/get_weight_version")["weight_version"] == named


def test_resume_without_the_graphs_holds_requests_until_they_are_back(
    server: Server, checkpoints: Path, trainers: Trainers
) -> None:
    """xtuner releases all memory, and asks for the weights and the KV cache alone."""
    client = Client(server, EVERY["xtuner-tensor-colocated"], checkpoints, trainers)
    client.pause()
    client.send(1, "v1")
    resume = "/resume_memory_occupation"
    assert server.post(resume, {"tags": ["kv_cache"]})["status_code"] == 200
    refuse(client.resume(), "cuda_graph", status_code=409)
    assert server.post(resume, {"tags": ["cuda_graph"]})["status_code"] == 200
    assert client.resume()["status_code"] == 200
    expect_served(server, 1)


def test_path_of_torchrls_wait_is_gone_in_sglang(server: Server) -> None:
    """TorchRL asks for /get_load until no request runs, and raises without an answer."""
    response = httpx.get(server.url + "/get_load", **PLAIN)
    assert response.status_code == 404, response.text

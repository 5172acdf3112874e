"""Servers with unsupported settings are refused, or run as SGLang ships them, by a setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import marker
from harness.server import IN_A_FORK, Server, serve
from harness.starting import end, start
from sglang_inflight import unsupported
from sglang_inflight.client import Client
from sglang_inflight.vocabulary.errors import NotOffered
from tests.support.engine import run_script
from tests.support.load import Generation
from tests.support.pool import ServerPool
from tests.support.updates import expect_served

OFF = {"SGLANG_INFLIGHT_UNSUPPORTED": "off"}
# unsupported with our plugin, fine for SGLang alone
FLAGS, ENV = ("--pp-size", "2"), {"SGLANG_INFLIGHT_REQUIRE_UPDATE": "1"}
SETTINGS = {
    unsupported.NO_FIRST_UPDATE: ENV,
    unsupported.NO_AGES: {"SGLANG_INFLIGHT_KV_MAX_AGE": "2"},
}
# unsupported flags, by the error's text
REFUSED = {
    unsupported.NO_FIRST_UPDATE: FLAGS,
    unsupported.NO_LOCAL_BROADCAST: (
        "--tp-size", "2", "--attn-dp-size", "2", "--enable-dp-attention-local-control-broadcast",
        "--pp-size", "2",
    ),
    unsupported.NO_ROLE_SWITCH: ("--disaggregation-mode", "decode", "--enable-pd-role-switch"),
    unsupported.NO_SMG: ("--smg-grpc-mode",),
    unsupported.NO_AGES: FLAGS,
}  # fmt: skip


# slime, miles and verl launch a server like this, so plugins load during the launch
LAUNCHER = """
import sys

if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    launch_server(prepare_server_args(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The marker checkpoints v0 and v1, with a layer for each stage."""
    folder = tmp_path_factory.mktemp("stages")
    for version in range(2):
        marker.build_stages(folder / f"v{version}", version)
    return folder


@pytest.fixture
def launcher(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "the_launcher.py").write_text(LAUNCHER)
    return "-m", "the_launcher"


@pytest.mark.parametrize(
    "why", REFUSED, ids=["first update", "broadcast", "role switch", "smg", "ages"]
)
def test_unsupported_flags_are_refused_at_the_start(stages: Path, tmp_path: Path, why: str) -> None:
    expect_start_refused(IN_A_FORK, stages, tmp_path, why)


def test_unsupported_flags_are_refused_when_python_launches(
    launcher: tuple[str, ...], stages: Path, tmp_path: Path
) -> None:
    expect_start_refused(launcher, stages, tmp_path, unsupported.NO_FIRST_UPDATE)


def expect_start_refused(command: tuple[str, ...], stages: Path, folder: Path, why: str) -> None:
    log = folder / "log"
    arguments = [*command, "--model-path", str(stages / "v0"), *REFUSED[why]]
    with log.open("wb") as output:
        process = start(arguments, output=output, env=SETTINGS.get(why, {}), cwd=folder)
    try:
        assert process.wait(240) == 1
    finally:
        end(process)
    assert why in log.read_text()


@pytest.mark.parametrize("by_python", [False, True], ids=["by a command", "by Python"])
def test_inactive_server_runs_as_sglang_ships_it(
    pool: ServerPool, stages: Path, tmp_path: Path, launcher: tuple[str, ...], by_python: bool
) -> None:
    pool.discard()  # one server at a time
    why = unsupported.NO_FIRST_UPDATE
    flags, env = (*FLAGS, "--weight-version", "v0"), OFF | ENV
    command, cwd = (launcher, tmp_path) if by_python else (None, None)
    log = tmp_path / "log"
    with serve(stages / "v0", *flags, log=log, env=env, command=command, cwd=cwd) as server:
        expect_our_calls_refused(server, stages, why)
        expect_sglangs_calls_work(server, stages)
        assert server.log_text().count("runs as SGLang ships it") == 1


def expect_our_calls_refused(server: Server, stages: Path, why: str) -> None:
    said = server.get("/inflight/status")
    assert said == {"active": False, "message": why, "status_code": 200}
    with Client(server.url) as client, pytest.raises(NotOffered, match="needs"):
        client.status()
    calls: list[tuple[str, dict[str, Any]]] = [
        (
            "/update_weights_from_disk",
            {"model_path": str(stages / "v1"), "non_blocking": True},
        ),
        ("/pause_generation", {"mode": "in_place", "lease_s": 5}),
        ("/inflight/rollback", {}),
        ("/generate", {"input_ids": [5, 6], "exact_weight_version": "v0"}),
        ("/v1/completions", {"prompt": "t300", "model": "default", "min_epoch": 0}),
    ]
    for path, body in calls:
        refused = server.post(path, body)
        assert (refused["status_code"], why in refused["message"]) == (501, True), refused
    for custom in ({"max_version_lag": 1}, {"min_epoch": 0}):
        sampling = {"custom_params": custom}
        generation = Generation(server, tokens=3, sampling=sampling, stream=False)
        generation.wait_for_end()
        assert (generation.status, why in str(generation.refusal)) == (400, True)


def expect_sglangs_calls_work(server: Server, stages: Path) -> None:
    """Check SGLang's own calls, one with a field of ours at its default."""
    expect_served(server, 0)
    v1 = {"model_path": str(stages / "v1"), "weight_version": "v1", "non_blocking": False}
    answer = server.post("/update_weights_from_disk", v1)
    assert (answer["status_code"], answer["success"], "epoch" in answer) == (200, True, False)
    output = Generation(server, tokens=4).output()
    assert output.tokens == [marker.token(1)] * 4
    assert output.meta["weight_versions"] == [{"version": "v1", "start": 0, "end": 4}]
    assert "kv_versions" not in output.meta


def test_inactive_engine_runs_as_sglang_ships_it(
    stages: Path, pool: ServerPool, tmp_path: Path
) -> None:
    pool.discard()
    said = run_script("tests.support.inactive_engine", stages, tmp_path)
    assert said["refused"].startswith(unsupported.ONE_TOKENIZER)
    assert said["status"] == {"active": False, "message": unsupported.ONE_TOKENIZER}
    for call in ("pause", "async rollback"):
        assert said[call] == ["NotOffered", unsupported.ONE_TOKENIZER]
    assert said["in flight"] == ["NotOffered", f"non_blocking: {unsupported.ONE_TOKENIZER}"]
    assert said["update"][0] is True
    assert said["tokens"] == [[marker.token(version)] * 3 for version in (0, 1)]

"""The start of processes. Servers of most other tests are forked, and one here is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from harness.server import AS_USERS_DO_IN_A_FORK, serve
from harness.starting import end, start
from tests.support.load import ENDLESS, expect_all_go_on, start_running, update, versions_of
from tests.support.plugins import with_plugin
from tests.support.pool import ServerPool


def test_sglang_serve_loads_the_plugin_in_every_process(
    checkpoints: Path, pool: ServerPool, tmp_path: Path
) -> None:
    """Each process finds the plugin by its entry point, and each rank has its own hash seed."""
    pool.discard()  # one server at a time
    log, flags = tmp_path / "log", ("--weight-version", "v0", "--tp-size", "2")
    env = {"TORCHDYNAMO_DISABLE": "0"}  # compiled, as for users
    with serve(checkpoints / "v0", *flags, log=log, env=env, fresh=True) as server:
        running = start_running(server, 3, tokens=ENDLESS)
        for version in (1, 2):
            update(server, checkpoints, version, non_blocking=True)
            for generation in running:
                generation.wait_for_tokens(generation.count + 4)
        for output in expect_all_go_on(running):
            assert versions_of(output) == ["v0", "v1", "v2"]


def test_server_refuses_to_start_half_patched(checkpoints: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = start(
            [*AS_USERS_DO_IN_A_FORK, "--model-path", str(checkpoints / "v0")],
            output=output,
            env=with_plugin("rival"),
        )
    try:
        assert process.wait(240) == 1
    finally:
        end(process)
    text = log.read_text()
    assert re.search(r"Scheduler\.pause_generation.*plugin 'inflight_rival' replaces", text, re.S)
    assert "Uvicorn" not in text


def test_doctor_reports_healthy() -> None:
    doctor = Path(sys.executable).with_name("sglang-inflight")
    told = subprocess.run(
        [sys.executable, doctor, "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    report = json.loads(told.stdout)
    assert report["healthy"]
    targets = [found["target"].rpartition(".")[2] for found in report["functions"]]
    assert "pause_generation" in targets

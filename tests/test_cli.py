"""The command line, against a server under load."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from harness import marker
from harness.server import Server, free_port
from sglang_inflight.cli import app
from sglang_inflight.client import digest_of_all, digests
from tests.support.faults import Faults
from tests.support.load import (
    ENDLESS,
    expect_all_go_on,
    pause,
    resume,
    start_running,
)
from tests.support.updates import expect_served, expect_to_run_on, serving

pytest_plugins = ["tests.support.fixtures"]

STATUS = "/inflight/status"


def _run(server: Server, *words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"SGLANG_URL": server.url})


def _json(server: Server, *words: str) -> Any:
    result = _run(server, *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_pause_update_and_rollback_commands_work_under_load(
    server: Server, checkpoints: Path
) -> None:
    generations = start_running(server, 2, tokens=ENDLESS)
    pause_id = _run(server, "pause").stdout.strip()
    assert _json(server, "status")["holders"][0]["pause_id"] == pause_id
    shown = _run(server, "status").stdout
    assert pause_id in shown.replace("\n", "")
    assert re.search(r"staging mode +device", shown), shown
    stale = _run(server, "continue", "nobody")
    assert (stale.exit_code, "nobody" in stale.stderr) == (3, True)
    assert _run(server, "continue", pause_id).exit_code == 0
    updated = _json(
        server, "update", "disk", str(checkpoints / "v1"), "--weight-version", "v1",
        "--expected-version", "v0",
    )  # fmt: skip
    assert updated["weight_version"] == "v1"
    for generation in generations:
        generation.wait_for_tokens(generation.count + 3)
    back = _run(server, "rollback")
    assert (back.exit_code, back.stdout.startswith("v1 → v0 on 1 ranks")) == (0, True)
    expect_to_run_on(server, generations, [0, 1, 0])


def test_refused_update_exits_1_and_changes_nothing(server: Server) -> None:
    before = serving(server)
    refused = _run(server, "update", "disk", "/no/such/folder")
    assert (refused.exit_code, "/no/such/folder" in refused.stderr) == (1, True)
    assert serving(server) == before


def test_update_compares_the_expected_digest(server: Server, checkpoints: Path) -> None:
    before = serving(server)
    words = "update", "disk", str(checkpoints / "v1"), "--expected-digest"
    refused = _run(server, *words, "0123456789abcdef")
    assert (refused.exit_code, "0123456789abcdef" in refused.stderr) == (1, True)
    assert serving(server) == before
    whole = digest_of_all(digests(marker.tensors(1)).values())
    assert _json(server, *words, whole)["ranks"][0]["received_digest"] == whole


def test_unreachable_server_exits_5() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = CliRunner().invoke(app, ["status", "--url", url])
    assert (result.exit_code, url in result.stderr) == (5, True)


# ---- at a terminal, until Ctrl-C ---------------------------------------------------------


class Terminal:
    """A command in its own process, made to believe that its output is a terminal."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def read_until(self, *patterns: str) -> str:
        """Read output until it has all of ``patterns``."""
        assert self._process.stdout is not None
        text = ""
        while not all(re.search(pattern, text) for pattern in patterns):
            piece = os.read(self._process.stdout.fileno(), 65536)
            assert piece, f"it ended before it said {patterns}: {text}"
            text += piece.decode()
        return text

    def interrupt(self) -> tuple[int, str]:
        """Press Ctrl-C, and return the exit code and the rest of the output."""
        self._process.send_signal(signal.SIGINT)
        return self.end()

    def end(self) -> tuple[int, str]:
        output, _ = self._process.communicate(timeout=60)
        return self._process.returncode, output.decode()


@contextmanager
def _terminal(url: str, *words: str) -> Iterator[Terminal]:
    command = [sys.executable, "-c", "from sglang_inflight.cli import app; app()", *words]
    env = {**os.environ, "SGLANG_URL": url, "TTY_COMPATIBLE": "1", "COLUMNS": "120"}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            yield Terminal(process)
        finally:
            process.kill()


def test_pause_can_reject_new_requests(server: Server) -> None:
    pause_id = _run(server, "pause", "--new-requests", "reject").stdout.strip()
    assert "new requests are rejected" in " ".join(_run(server, "status").stdout.split())
    assert _json(server, "status")["new_requests"] == "reject"
    assert _run(server, "pause", "--new-requests", "both").exit_code == 1
    assert _run(server, "continue", pause_id).exit_code == 0


def test_watch_shows_a_pause(server: Server) -> None:
    generations = start_running(server, 2, tokens=ENDLESS)
    with _terminal(server.url, "status", "--watch", "--every", "0.1") as terminal:
        terminal.read_until("state", "2 running")
        pause(server, "in_place")
        terminal.read_until("frozen", "held by")
        assert terminal.interrupt()[0] == 0
    resume(server)
    expect_all_go_on(generations)


def test_watch_prints_json(server: Server) -> None:
    with _terminal(server.url, "status", "--watch", "--json", "--every", "0.1") as terminal:
        lines = terminal.read_until(r"\n\{", r"\}\n\{").splitlines()
        assert json.loads(lines[0])["weight_version"] == "v0"
        assert terminal.interrupt()[0] == 0


def test_update_shows_staging_progress(
    faulty_server: Server, faults: Faults, checkpoints: Path
) -> None:
    faults.inject("middle", "hang")
    folder = str(checkpoints / "v1")
    with _terminal(faulty_server.url, "update", "disk", folder, "--weight-version", "v1") as bar:
        # the checkpoint's size is known, so the bar has an end
        shown = bar.read_until("staging v1", " kB", "[╸╺]")  # end of the staged part
        assert re.search(r"[1-9][0-9.]*/[0-9.]+ kB", shown), shown
        faults.clear()
        code, output = bar.end()
    assert (code, "v0 → v1 on 1 ranks" in output) == (0, True)
    expect_served(faulty_server, 1)

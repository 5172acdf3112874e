"""The command line, against a server under load."""

from __future__ import annotations

import itertools
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

import pytest
from typer.testing import CliRunner, Result

from harness.server import Server, free_port
from sglang_inflight.cli import app
from tests.support.faults import Faults
from tests.support.load import (
    ENDLESS,
    expect_all_go_on,
    pause,
    resume,
    start_running,
    until,
)
from tests.support.proxy import Proxy
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


def test_unreachable_server_exits_5() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = CliRunner().invoke(app, ["status", "--url", url])
    assert (result.exit_code, url in result.stderr) == (5, True)


# ---- at a terminal, until Ctrl-C ---------------------------------------------------------


class Terminal:
    """A command in its own process, made to believe that its output is a terminal."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def read_until(self, *words: str) -> str:
        """Read output until it holds all of ``words``."""
        assert self._process.stdout is not None
        text = ""
        while not all(word in text for word in words):
            piece = os.read(self._process.stdout.fileno(), 65536)
            assert piece, f"it ended before it said {words}: {text}"
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
        lines = terminal.read_until("\n{", "}\n{").splitlines()
        assert json.loads(lines[0])["weight_version"] == "v0"
        assert terminal.interrupt()[0] == 0


def test_update_shows_staging_progress(
    faulty_server: Server, faults: Faults, checkpoints: Path
) -> None:
    faults.inject("middle", "hang")
    folder = str(checkpoints / "v1")
    with _terminal(faulty_server.url, "update", "disk", folder, "--weight-version", "v1") as bar:
        # the checkpoint's size is known, so the bar has an end
        shown = bar.read_until("staging v1", " kB", "╺")  # end of the staged part
        assert re.search(r"[1-9][0-9.]*/[0-9.]+ kB", shown), shown
        faults.clear()
        code, output = bar.end()
    assert (code, "v0 → v1 on 1 ranks" in output) == (0, True)
    expect_served(faulty_server, 1)


# ---- timelines ---------------------------------------------------------------------------


def _wait_for_two_looks(proxy: Proxy) -> None:
    seen = proxy.arrivals.count(STATUS)
    until("it has looked twice", lambda: proxy.arrivals.count(STATUS) >= seen + 3)


def test_timeline_records_a_pause_and_an_update(
    server: Server, checkpoints: Path, tmp_path: Path
) -> None:
    file = tmp_path / "timeline.html"
    words = ("timeline", str(file), "--every", "0.05", "--json")
    generations = start_running(server, 2, tokens=ENDLESS)
    with Proxy(server).serving() as proxy, _terminal(proxy.url, *words) as terminal:
        _wait_for_two_looks(proxy)
        pause(server, "in_place")
        _wait_for_two_looks(proxy)
        resume(server)
        _run(server, "update", "disk", str(checkpoints / "v1"), "--weight-version", "v1")
        expect_to_run_on(server, generations, [0, 1])
        _wait_for_two_looks(proxy)
        code, output = terminal.interrupt()
    assert code == 0, output
    samples = json.loads(output)["samples"]
    states = [sample["state"] for sample in samples]
    assert {"running", "frozen"} <= set(states)
    assert max(sample["tokens_per_s"] for sample in samples) > 0
    still = [
        after
        for before, after in itertools.pairwise(samples)
        if before["state"] == after["state"] == "frozen"
    ]
    assert {sample["tokens_per_s"] for sample in still} == {0}
    assert [samples[0]["weight_version"], samples[-1]["weight_version"]] == ["v0", "v1"]
    page = file.read_text()
    assert ("<svg" in page, ">v1<" in page) == (True, True)


def test_timeline_ends_after_the_given_seconds(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "timeline.png"
    result = _run(server, "timeline", str(file), "--seconds", "0.3")
    assert (result.exit_code, str(file) in result.stdout.replace("\n", "")) == (0, True)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_timeline_draws_what_it_has_when_the_server_goes(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "timeline.svg"
    with Proxy(server).serving() as proxy, _terminal(proxy.url, "timeline", str(file)) as terminal:
        _wait_for_two_looks(proxy)
        proxy.stop()
        code, output = terminal.end()
    assert (code, proxy.url in output) == (5, True)
    assert "<svg" in file.read_text()


@pytest.mark.parametrize("name", ["timeline.gif", "no/such/folder/timeline.png"])
def test_timeline_refuses_an_unwritable_file(tmp_path: Path, name: str) -> None:
    result = CliRunner().invoke(app, ["timeline", str(tmp_path / name)])
    assert result.exit_code == 2


def test_timeline_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "sglang_inflight.cli.chart", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["timeline", str(tmp_path / "timeline.png")])
    assert (result.exit_code, "sglang-inflight[cli-plots]" in result.stderr) == (1, True)

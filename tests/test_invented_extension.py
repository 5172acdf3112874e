"""An extension of a stranger's brings a call, a hook and a joint, and touches no file of ours."""

from __future__ import annotations

from pathlib import Path

import httpx

from harness.server import PLAIN, serve
from tests.support.forked import run
from tests.support.load import Generation, expect_whole
from tests.support.plugins import with_plugin

ENV = with_plugin("invented")
ON = {**ENV, "SGLANG_INFLIGHT_INVENTED": "1"}


def test_extension_answers_a_call_about_requests_and_forwards(
    checkpoints: Path, tmp_path: Path
) -> None:
    flags = ("--weight-version", "v0")
    with serve(checkpoints / "v0", *flags, log=tmp_path / "log", env=ON) as server:
        (before,) = httpx.get(f"{server.url}/invented", **PLAIN).json()
        for _ in range(3):
            expect_whole(Generation(server, tokens=5))
        (counts,) = httpx.get(f"{server.url}/invented", **PLAIN).json()
    assert counts["queued"] - before["queued"] == 3
    assert counts["launched"] - before["launched"] >= 3 * 5


def test_extension_that_is_off_imports_no_module_of_its_own() -> None:
    code = (
        "import sys\n"
        "from sglang_inflight import plugin\n"
        "plugin.install()\n"
        "print(sorted(name for name in sys.modules if name.startswith('inflight_invented')))\n"
    )
    for env, names in (
        (ENV, ["inflight_invented"]),
        (
            ON,
            [
                "inflight_invented",
                "inflight_invented.front_end",
                "inflight_invented.messages",
                "inflight_invented.on_rank",
            ],
        ),
    ):
        said = run(["-c", code], env=env, wait_s=240)
        assert said.splitlines()[-1:] == [str(names)], said

"""Memory that an installed package takes from the KV cache, by SGLang's own accounting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.server import serve
from tests.support.plugins import with_plugin

PLUGIN = with_plugin("device_size")
WITHOUT_US = "inflight_reference,inflight_device_size"
# A server imports the same with either list: only the platform's plugin is asked for at an import.
# The list is set in a fork, because a fork with another list at its start has another zygote.
START_WITHOUT_US = (
    "-c",
    "import os, runpy\n"
    f"os.environ['SGLANG_PLUGINS'] = {WITHOUT_US!r}\n"
    "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)\n",
)
# no other limit of the KV cache than the device's memory
FLAGS = ("--max-total-tokens", "1000000000", "--mem-fraction-static", "0.5")


def memory_of(
    model: Path, log: Path, env: dict[str, str], command: Sequence[str] | None = None
) -> dict[str, Any]:
    with serve(model, *FLAGS, log=log, env={**PLUGIN, **env}, command=command) as server:
        has_us = server.get("/inflight/status")["status_code"] == 200
        assert has_us == (command != START_WITHOUT_US)
        (state,) = server.get("/server_info")["internal_states"]
        memory: dict[str, Any] = state["memory_usage"]
    return memory


def test_package_without_updates_takes_memory_from_the_kv_cache(
    checkpoints: Path, tmp_path: Path
) -> None:
    """The form is ``changes``, as on a server with a GPU."""
    ours = memory_of(checkpoints / "v0", tmp_path / "ours", {"SGLANG_INFLIGHT_STAGING": "changes"})
    theirs = memory_of(checkpoints / "v0", tmp_path / "theirs", {}, START_WITHOUT_US)
    # the cache takes a share of the device, so it shows that the size of the device was taken
    assert theirs["kvcache"] == pytest.approx(0.5, rel=0.01)
    assert ours["token_capacity"] == theirs["token_capacity"]
    assert theirs["startup_available"] - ours["startup_available"] <= 64 / 1024

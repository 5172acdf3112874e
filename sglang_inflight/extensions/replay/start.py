"""Starts a server like the one that made a rollout."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from sglang_inflight.extensions.replay import SETTING
from sglang_inflight.vocabulary.errors import Refused

_START_TIMEOUT_S = 1800.0
_END_TIMEOUT_S = 60.0


def arguments_of(server: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the command line's arguments in a record's fingerprint."""
    found: list[str] = []
    for name, value in sorted(server.get("arguments", {}).items()):
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            found.append(flag)
        elif value not in (False, None):
            found += [flag, str(value)]
    return tuple(found)


def environment_of(server: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables in a record's fingerprint."""
    return dict(server.get("environment", {}))


@contextmanager
def started(
    model_path: str, version: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield the URL of a server of ``model_path``, and end it afterwards.

    Raises ``Refused`` with the end of its log if it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", model_path,
        "--host", "127.0.0.1", "--port", str(port), "--weight-version", version, *arguments,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                env=os.environ | environment | {SETTING: "1"},
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/health_generate", timeout=10).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise Refused(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")

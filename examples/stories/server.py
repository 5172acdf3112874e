"""Start a server as a user would, and end it in every case."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch

START_TIMEOUT_S = 600.0
END_TIMEOUT_S = 10.0
POLL_S = 0.5

# enough for the demo's four stories
_ON_CPU = ("--max-total-tokens", "16384", "--max-running-requests", "8")
# only changes are held beside the weights, whatever the platform's default
_STAGING = {"SGLANG_INFLIGHT_STAGING": "changes"}
_ON_CUDA = ("--mem-fraction-static", "0.3", "--max-running-requests", "8")


class ServerFailed(Exception):
    """The server did not start. The log says why."""


@dataclass(frozen=True)
class Server:
    url: str
    command: list[str]
    log: Path


@asynccontextmanager
async def start_server(
    model: Path,
    *,
    name: str,
    version: str,
    log: Path,
    more: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[Server]:
    """Start a server of ``model``, whose weights are named ``version``.

    ``env`` has settings beside those of this process.
    """
    from sglang.srt.utils.network import get_free_port_below_ephemeral

    port = get_free_port_below_ephemeral()
    command = [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(model), "--served-model-name", name),
        *("--weight-version", version),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
        *(_ON_CUDA if torch.cuda.is_available() else _ON_CPU),
        *more,
    ]
    server = Server(f"http://127.0.0.1:{port}", command, log)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            env={**os.environ, **_STAGING, **(env or {})},
        )
    try:
        await _until_healthy(process, server)
        yield server
    finally:
        _end(process)


async def _until_healthy(process: subprocess.Popen[bytes], server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerFailed(f"it ended with {process.returncode}, see {server.log}")
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get("/health")).is_success:
                    return
            await asyncio.sleep(POLL_S)
    raise ServerFailed(f"it was not healthy after {START_TIMEOUT_S:.0f} s, see {server.log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and its children, which share a session."""
    _signal_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def _signal_group(leader: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, what)

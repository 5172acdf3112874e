"""The demo's side of the trainer process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from examples.stories.updates import Receipt


class TrainerFailed(Exception):
    """The trainer and the server formed no group. The trainer's log may say more."""


class TrainerProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def join(self) -> None:
        answer = await self._read()
        if answer.get("event") != "ready":
            raise TrainerFailed(f"the trainer could not join the server: {answer['message']}")

    async def send(self) -> Receipt:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(b"go\n")
            await self._process.stdin.drain()
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            return {"success": False, "message": f"it ended with {await self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def start_trainer(
    server: str, checkpoint: Path, version: str, log: Path
) -> AsyncIterator[TrainerProcess]:
    """Start the trainer. It joins at once, so that only the broadcast remains."""
    command = [
        *("-m", "examples.stories.trainer"),
        *("--server", server, "--checkpoint", str(checkpoint), "--weight-version", version),
    ]
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            limit=1 << 20,
        )
    try:
        yield TrainerProcess(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

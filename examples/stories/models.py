"""The demo's side of the process that builds its checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from examples.stories.smollm2 import BASE, base_path, styled_path
from examples.stories.styles import HEADLINE, VERSE

OnProgress = Callable[[str, int, int], None]

# time to remove a partial checkpoint
END_TIMEOUT_S = 10.0


class BuildFailed(Exception):
    """A checkpoint cannot be built."""


class Models:
    """Paths of the checkpoints. ``ready`` has a future for each checkpoint, by name.

    The futures and the calls belong to the event loop that made this object.
    """

    def __init__(self, cache: Path) -> None:
        self.base = base_path(cache)
        self.headline = styled_path(cache, HEADLINE)
        self.verse = styled_path(cache, VERSE)
        loop = asyncio.get_running_loop()
        self.ready: dict[str, asyncio.Future[None]] = {
            name: loop.create_future() for name in (BASE, HEADLINE.name, VERSE.name)
        }

    @property
    def are_there(self) -> bool:
        return all(path.exists() for path in (self.base, self.headline, self.verse))

    def settle(self, names: list[str], failure: BuildFailed | None = None) -> None:
        for name in names:
            future = self.ready[name]
            if future.done():
                continue
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)
                # nobody may ask for this checkpoint
                future.exception()

    async def follow(self, process: asyncio.subprocess.Process, on_progress: OnProgress) -> None:
        """Follow the process to its end. Missing checkpoints have failed then."""
        assert process.stdout is not None
        reason = "see the log"
        async for line in process.stdout:
            event: dict[str, Any] = json.loads(line)
            if "error" in event:
                reason = event["error"]
                continue
            on_progress(event["name"], event["done"], event["of"])
            if event["done"] == event["of"]:
                self.settle([event["name"]])
        failure = BuildFailed(f"the model cannot be made: {reason}")
        self.settle(list(self.ready), failure)


@asynccontextmanager
async def make_models(cache: Path, log: Path, on_progress: OnProgress) -> AsyncIterator[Models]:
    """Use existing checkpoints, and build the missing ones in the background."""
    models = Models(cache)
    if models.are_there:
        models.settle(list(models.ready))
        yield models
        return
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "examples.stories.build", "--cache", str(cache)),
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            # its threads share the cores with a server
            env={"OMP_WAIT_POLICY": "passive", **os.environ},
        )
    following = asyncio.create_task(models.follow(process, on_progress))
    try:
        yield models
    finally:
        await _end(process)
        following.cancel()


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()

"""TRL's processes, in TRL's environment, with the stand-ins for what needs CUDA."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.starting import end
from tests.trainers.environment import python_of

HERE = Path(__file__).parent
# many times what a training takes on busy cores
PATIENCE_S = 600
_ENV = {
    "PYTHONPATH": str(HERE / "stand_ins"),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


class Process:
    """A script with the processes that it starts."""

    def __init__(self, script: str, log: Path, **settings: Any) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [python_of("trl"), str(HERE / script), json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ENV},
                process_group=0,
            )

    def kill(self) -> None:
        """Send SIGKILL to all of its processes, as a machine's end would."""
        end(self._process)

    def check(self) -> None:
        """Raise ``AssertionError`` with the log if the script failed."""
        if self._process.poll() not in (None, 0):
            raise AssertionError(self._log.read_text(errors="replace")[-4000:])

    def finish(self) -> None:
        """Wait for the script's success."""
        self._process.wait(PATIENCE_S)
        self.check()


@contextlib.contextmanager
def running(script: str, log: Path, **settings: Any) -> Iterator[Process]:
    process = Process(script, log, **settings)
    try:
        yield process
    finally:
        process.kill()

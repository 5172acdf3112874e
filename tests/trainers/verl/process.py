"""A process of verl's environment, with all that Ray starts for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from harness.starting import ROOT
from tests.trainers.environment import python_of
from tests.trainers.verl.settings import ENV

TIMEOUT_S = 1500
# characters of the log's end that a failure shows
SHOWN = 20000


def run(arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
    """Run ``python`` with ``arguments`` until its end, and fail if it fails."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [str(python_of("verl")), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENV, **env},
            cwd=ROOT,
        )
    try:
        code: int | None = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end(process)
    assert code == 0, log.read_text(errors="replace")[-SHOWN:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill ``process`` and those that it has started, Ray's and the server's among them."""
    if process.poll() is not None:
        return
    started = psutil.Process(process.pid).children(recursive=True)
    for each in [psutil.Process(process.pid), *started]:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()

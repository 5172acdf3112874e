"""Processes with a limit, ended with everything that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_limited(
    command: Sequence[str],
    *,
    log: Path,
    limit_s: float,
    cwd: Path,
    env: Mapping[str, str] | None = None,
) -> int | None:
    """Run ``command`` in a session of its own, and return its status, or None after ``limit_s``.

    Its output goes to ``log``. Every process of the session is killed in the end.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill_session(process.pid)
            process.wait()


def _kill_session(session: int) -> None:
    """Kill every process of the session: servers have process groups of their own."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # the name before it is in parentheses, and may hold spaces
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session:
                os.kill(int(stat.parent.name), signal.SIGKILL)

"""A failed test's servers: the end of each log, and each thread's stack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.server import Server

# characters: enough for the last actions, and short beside other failures
LONGEST = 2000
TIMEOUT_S = 30.0


def describe(server: Server) -> str:
    """Return the end of the server's log and its threads' stacks."""
    log = server.log_text()[-LONGEST:]
    if not server.is_alive():
        return f"{log}\n(it has ended)"
    return f"{log}\n{_threads(server.process.pid)[-LONGEST:]}"


def _threads(pid: int) -> str:
    """Dump the stacks by ``py-spy``, which SGLang installs. The system may forbid it."""
    command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(pid)]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"where its threads are is not known: {error}"
    return ran.stdout or ran.stderr

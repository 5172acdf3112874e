"""What a server did when its test failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.server import Server

# characters: enough to see what it did last, and short beside other failures
LONGEST = 2000
TIMEOUT_S = 30.0


def describe(server: Server) -> str:
    """The end of its log, and where its threads are."""
    log = server.log_text()[-LONGEST:]
    if not server.is_alive():
        return f"{log}\n(it has ended)"
    return f"{log}\n{_threads(server.process.pid)[-LONGEST:]}"


def _threads(pid: int) -> str:
    """By ``py-spy``, which SGLang brings along. It may be kept from looking."""
    command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(pid)]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"where its threads are is not known: {error}"
    return ran.stdout or ran.stderr

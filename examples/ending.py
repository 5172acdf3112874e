"""An end by SIGTERM that cleans up."""

from __future__ import annotations

import signal
import sys
from typing import Any, NoReturn


def exit_at_sigterm() -> None:
    """Let SIGTERM raise ``SystemExit``, so that cleanup ends servers and removes partial files."""
    signal.signal(signal.SIGTERM, _stop)


def _stop(*_: Any) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)

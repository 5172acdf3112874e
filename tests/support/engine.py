"""Scenes with ``sglang.Engine``, each played by a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def play(module: str, model: Path, folder: Path, env: dict[str, str] | None = None) -> Any:
    """What ``python -m module MODEL FILE`` wrote into its file, as JSON."""
    file = folder / "answers.json"
    played = subprocess.run(
        [sys.executable, "-m", module, str(model), str(file)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert file.is_file(), played.stdout[-2000:] + played.stderr[-4000:]
    return json.loads(file.read_text())

"""Scripts with ``sglang.Engine``, each run in its own process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.starting import ROOT, end, start

TIMEOUT_S = 280


def run_script(module: str, model: Path, folder: Path, env: dict[str, str] | None = None) -> Any:
    """Run ``python -m module MODEL FILE``, and return the JSON from FILE."""
    file, log = folder / "answers.json", folder / "engine.log"
    with log.open("wb") as sink:
        process = start(
            ["-m", module, str(model), str(file)],
            output=sink,
            env=env or {},
            cwd=ROOT,
        )
    try:
        process.wait(TIMEOUT_S)
    finally:
        end(process)
    assert file.is_file(), log.read_text(errors="replace")[-6000:]
    return json.loads(file.read_text())

"""Leave out the tests of extensions whose folders are not there."""

from __future__ import annotations

from pathlib import Path

from harness.starting import ROOT

HERE = Path(__file__).parent
collect_ignore = [
    folder.name
    for folder in HERE.iterdir()
    if folder.is_dir() and not (ROOT / "sglang_inflight" / "extensions" / folder.name).exists()
]

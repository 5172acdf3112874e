"""The fork: a copy of the installed SGLang with the series in its files.

The fork is for images built from a source tree. ``patch -p1`` with the files of ``patches/``
gives the same tree. The plugin finds the series in it and patches nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from sglang_inflight.livepatch import AppliedFunction, Series, load_series


def write_fork(destination: Path, series: Series | None = None) -> list[AppliedFunction]:
    """Write ``destination/sglang``. Raises ``PatchRefused`` before the first file is written."""
    series = series or load_series()
    plan = series.plan()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise FileExistsError(f"{destination} is not an empty folder; the fork needs one")
    shutil.copytree(
        series.root / series.distribution,
        destination / series.distribution,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for module in plan.modules:
        (destination / module.file).write_bytes(module.text.encode())
    return plan.functions

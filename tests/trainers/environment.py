"""The Python of a trainer's own environment, which its make target sets up."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.starting import ROOT


def python_of(name: str) -> Path:
    """Return the Python of ``.venv-NAME``. Skip the test where ``make test-NAME`` has not run."""
    folder = ROOT / f".venv-{name}"
    if not (folder / ".ready").exists():
        pytest.skip(f"needs {folder.name}: make test-{name}")
    return folder / "bin" / "python"

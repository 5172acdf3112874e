"""``when_imported`` runs its callback once, before or after the import."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sglang_inflight.late_import import when_imported


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module in a package not imported yet."""
    package = f"late_{tmp_path.name}"
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "app.py").write_text("import time\n\nrun_at = time.monotonic()\n")
    monkeypatch.syspath_prepend(tmp_path)
    return f"{package}.app"


def test_when_imported_runs_at_once_for_a_loaded_module(name: str) -> None:
    seen: list[ModuleType] = []
    module = importlib.import_module(name)
    when_imported(name, seen.append)
    assert seen == [module]


def test_when_imported_runs_last_callback_at_import(name: str) -> None:
    first: list[float] = []
    last: list[float] = []
    for seen in (first, last):
        # the module has run by then
        when_imported(
            name, functools.partial(lambda seen, module: seen.append(module.run_at), seen)
        )
    assert first == last == []
    module = importlib.import_module(name)
    assert (first, last) == ([], [module.run_at])
    # other importers see an ordinary module
    assert module.__spec__ is not None
    assert module.__loader__ is module.__spec__.loader
    assert "run_at" in inspect.getsource(module)
    importlib.reload(module)
    assert (len(first), len(last)) == (0, 1)
    assert sys.modules[name] is module

"""No module imports itself by way of others, imports for the type checker included."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from harness.starting import ROOT

PACKAGE = "sglang_inflight"
# where the modules of each distribution lie
SOURCES = {PACKAGE: ROOT, "sglang_inflight_tools": ROOT / "tools"}


def name_of(path: Path, source: Path = ROOT) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Return each name of ours in an import, of a module or of something in it."""
    return tuple(_imported(ast.parse(path.read_text())))


def _imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_modules_import_in_one_direction() -> None:
    paths = {
        name_of(path, source): path
        for package, source in SOURCES.items()
        for path in (source / package).rglob("*.py")
    }
    graph = {
        name: {
            imported if imported in paths else imported.rpartition(".")[0]
            for imported in imports_of(path)
        }
        & paths.keys()
        for name, path in paths.items()
    }
    assert len(graph) > 1
    # raises CycleError, which names the modules of a circle
    TopologicalSorter(graph).prepare()


def test_server_imports_no_tool() -> None:
    imported = {name for path in (ROOT / PACKAGE).rglob("*.py") for name in imports_of(path)}
    assert {name.partition(".")[0] for name in imported if name.startswith(PACKAGE)} == {PACKAGE}

"""Our Protocols, imports and hooks fit the installed SGLang, and mypy checks us against them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import version

import pytest

from sglang_inflight.livepatch import installed_root, supported_versions
from sglang_inflight.porting.hooks import look_at_hooks
from sglang_inflight.porting.imports import HOUSE, look_at_imports
from sglang_inflight.porting.protocols import look_at_protocols
from sglang_inflight.porting.source_tree import SourceTree

# enums annotated by their own name, without members of ours to miss
ENUMS = {"HookType", "LoadFormat"}


@pytest.fixture(scope="module")
def installed() -> SourceTree:
    return SourceTree(installed_root("sglang"))


def test_installed_sglang_is_supported() -> None:
    assert version("sglang") in supported_versions()


def test_protocols_fit_installed_sglang(installed: SourceTree) -> None:
    findings = look_at_protocols(installed, version("sglang"))
    assert {"Scheduler.waiting_queue", "TokenizerManager.rid_to_state"} <= {
        finding.name for finding in findings
    }
    assert [finding for finding in findings if not finding.fits] == []


def test_imports_fit_installed_sglang(installed: SourceTree) -> None:
    findings = look_at_imports(installed)
    assert findings
    assert [finding for finding in findings if not finding.fits] == []


def test_hooks_fit_installed_sglang(installed: SourceTree) -> None:
    assert [finding for finding in look_at_hooks(installed) if not finding.fits] == []


def test_no_annotation_names_an_sglang_class() -> None:
    """Such an annotation is ``Any`` to mypy, and hides every misspelt attribute."""
    named = {
        f"{file.relative_to(HOUSE)}: {name}"
        for file in HOUSE.rglob("*.py")
        for name in _annotated_with_upstreams(ast.parse(file.read_text()))
    }
    assert named == set()


def _annotated_with_upstreams(tree: ast.Module) -> Iterator[str]:
    upstreams = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").partition(".")[0] == "sglang"
        # bodies known to FastAPI by their class
        and node.module != "sglang.srt.entrypoints.openai.protocol"
        for alias in node.names
    }
    for node in ast.walk(tree):
        annotation = None
        if isinstance(node, ast.arg | ast.AnnAssign):
            annotation = node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            annotation = node.returns
        if annotation is not None:
            used = {each.id for each in ast.walk(annotation) if isinstance(each, ast.Name)}
            yield from (used & upstreams) - ENUMS

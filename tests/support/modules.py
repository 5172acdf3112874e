"""The list of modules in ``docs/architecture.md``, made from each module's first paragraph.

``python -m tests.support.modules`` writes it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from harness.starting import ROOT

PACKAGE = ROOT / "sglang_inflight"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules: written by python -m tests.support.modules -->\n", "<!-- end -->"


def describe_modules() -> str:
    """Return a table for each folder."""
    return "\n".join(_describe_folder(folder) for folder in _folders())


def written() -> str:
    """Return the list in the document."""
    text = ARCHITECTURE.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


def write() -> None:
    text = ARCHITECTURE.read_text()
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    ARCHITECTURE.write_text(head + BEGIN + describe_modules() + tail)


def _folders() -> Iterator[Path]:
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")}):
        if "__pycache__" not in folder.parts:
            yield folder


def _describe_folder(folder: Path) -> str:
    said = {path.name: _first_paragraph(path) for path in sorted(folder.glob("*.py"))}
    rows = [f"| `{name}` | {text} |\n" for name, text in said.items() if text is not None]
    head = f"| `{folder.relative_to(ROOT)}/` | |\n|---|---|\n"
    return head + "".join(rows) if rows else ""


def _first_paragraph(path: Path) -> str | None:
    """Return None for an empty module."""
    module = ast.parse(path.read_text())
    if not module.body:
        return None
    said = ast.get_docstring(module)
    assert said, f"{path} does not say what it is"
    return " ".join(said.split("\n\n")[0].split()).replace("``", "`")


if __name__ == "__main__":
    write()

"""The documents name existing files, and every call, setting and error."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from harness import pages
from harness.starting import ROOT
from sglang_inflight.settings import PREFIX, kinds
from sglang_inflight.vocabulary.calls import TABLE
from sglang_inflight.vocabulary.errors import ERRORS, InflightError
from tests.matrix import limits
from tests.matrix.__main__ import IN_LIMITS
from tests.matrix.columns import COLUMNS
from tests.matrix.configurations import CONFIGURATIONS
from tests.support.prose import FOLDERS, subjectless_comments

PACKAGE = ROOT / "sglang_inflight"
DOCS = ROOT / "docs"
PAGES = sorted((PACKAGE / "extensions").glob("*/README.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "tools" / "README.md", *sorted(DOCS.rglob("*.md"))]
OTHERS = [ROOT / "patches" / "README.md", *sorted((ROOT / "benchmarks").glob("*.md"))]


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def test_architecture_names_every_package() -> None:
    text = (DOCS / "architecture.md").read_text()
    folders = {path.parent.relative_to(ROOT) for path in PACKAGE.rglob("*.py")}
    names = {str(folder.relative_to(PACKAGE.name)) for folder in folders}
    missing = {name for name in names - {"."} if f"`{name}/`" not in text}
    assert not missing


def test_every_module_has_a_docstring() -> None:
    paths = (*PACKAGE.rglob("*.py"), *(ROOT / "tools").rglob("*.py"))
    trees = {path: ast.parse(path.read_text()) for path in paths}
    assert not [path for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_comments_begin_with_a_subject(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = [(path, *comment) for path in paths for comment in subjectless_comments(path)]
    assert not found


@pytest.mark.parametrize("document", [*DOCUMENTS, *PAGES], ids=name_of)
def test_named_files_exist(document: Path) -> None:
    text = document.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py|(?:[a-z_]+/)+)`", text)
    missing += [
        name for name in named if not (ROOT / name).exists() and not (PACKAGE / name).exists()
    ]
    assert links or named
    assert not missing


def anchors_of(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, *PAGES, *OTHERS], ids=name_of)
def test_linked_sections_exist(document: Path) -> None:
    """A link is to a section of the document itself, or of another one."""
    linked = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text())
    missing = [
        (name, anchor)
        for name, anchor in linked
        if anchor not in anchors_of(document.parent / name if name else document)
    ]
    assert not missing


def test_each_page_has_one_place_in_the_sites_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    places = re.findall(r"([\w/-]+\.md)$", navigation, flags=re.MULTILINE)
    of_docs = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    # the hook gives the extensions' pages theirs
    of_others = {name for pattern in pages.OUTSIDE for name in pages.outside(pattern)}
    assert sorted(places) == sorted(of_docs | of_others)


def test_reference_and_guide_name_every_call() -> None:
    documents = [*(DOCS / "guide").glob("*.md"), *(DOCS / "reference").glob("*.md")]
    text = "".join(document.read_text() for document in documents)
    paths = {call.path for call in TABLE.values() if call.path is not None}
    wanted = {path.removeprefix("/update_weights_from") for path in paths}
    wanted |= {PREFIX + field.name.upper() for kind in kinds() for field in fields(kind)}
    wanted |= set(ERRORS) - {InflightError.__name__}
    assert not {name for name in wanted if name not in text}


def test_matrix_rows_match_the_command() -> None:
    table = table_of(DOCS / "matrix.md")
    names = [each.name for each in CONFIGURATIONS]
    assert list(table) == ["", "---", *names], "run make matrix"
    assert table[""] == [*list(COLUMNS)[:-1], f"{list(COLUMNS)[-1]} |"]
    some = table_of(limits.PAGE)
    assert list(some) == ["", "---", *IN_LIMITS]
    assert {name: len(cells) for name, cells in some.items() if name} == dict.fromkeys(
        ["---", *IN_LIMITS], len(COLUMNS)
    )


def test_page_has_other_limits_than_the_servers() -> None:
    _, rest = limits.PAGE.read_text().split(limits.BEGIN)
    assert rest.split(limits.END)[0] == limits.write(), "run tests.matrix.limits"


def table_of(document: Path) -> dict[str, list[str]]:
    lines = [line.split(" | ") for line in document.read_text().splitlines()]
    return {cells[0].removeprefix("| "): cells[1:] for cells in lines if len(cells) > len(COLUMNS)}

"""The ledger names every patch and every mending hook, and only existing tests."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from harness.starting import ROOT
from tests.support.ledger import LEDGERS, Ledger

HEADS = ("Why", "How", "Upstream thread", "Test", "Drop when")
SERIES = sorted(ROOT.glob("patches/sglang-*"))
PATCHES = sorted({path.name for folder in SERIES for path in folder.glob("*.patch")})
SECTIONS = LEDGERS[None].sections
ENTRIES = {
    **{patch: SECTIONS.get(patch, "") for patch in PATCHES},
    **{title: text for ledger in LEDGERS.values() for title, text in ledger.mends.items()},
}


def test_patch_sections_match_patches() -> None:
    assert [title for title in SECTIONS if title.endswith(".patch")] == PATCHES


@pytest.mark.parametrize("ledger", LEDGERS.values(), ids=map(str, LEDGERS))
def test_every_mending_hook_has_a_section_beside_it(ledger: Ledger) -> None:
    mending = [target for target, _, why in ledger.rows if why.endswith("(mends)")]
    named = [
        hook
        for text in ledger.mends.values()
        for hook in re.findall(r"`([\w.]+)`", text.split("\n")[0])
    ]
    assert sorted(named) == sorted(mending)


def test_no_two_sections_have_one_title() -> None:
    titles = [title for ledger in LEDGERS.values() for title in ledger.mends]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize("name", filter(None, LEDGERS))
def test_extensions_page_says_for_whom_it_is(name: str) -> None:
    text = LEDGERS[name].path.read_text()
    for head in ("For", "Settings", "Limits"):
        assert re.search(rf"^- \*\*{head}\*\*: \S", text, re.M), head


@pytest.mark.parametrize("entry", ENTRIES)
def test_section_has_five_heads(entry: str) -> None:
    answers = dict(re.findall(r"^- \*\*(.+?)\*\*: (\S.*)$", ENTRIES[entry], re.M))
    assert tuple(answers) == HEADS


@pytest.mark.parametrize("entry", ENTRIES)
def test_section_names_existing_tests(entry: str) -> None:
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", ENTRIES[entry])
    assert named
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        assert test in functions, f"{file}::{test}"


def test_ledger_has_a_hooks_table() -> None:
    assert "| target | kind | why |" in SECTIONS["Hooks"]


@pytest.mark.parametrize("folder", SERIES, ids=lambda folder: folder.name)
def test_every_series_has_the_same_patches(folder: Path) -> None:
    assert sorted(path.name for path in folder.glob("*.patch")) == PATCHES


def test_pyproject_allows_exactly_patched_versions() -> None:
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (allowed,) = (r for r in map(Requirement, requirements) if r.name == "sglang")
    versions = [folder.name.removeprefix("sglang-") for folder in SERIES]
    assert list(allowed.specifier.filter(versions)) == versions
    bounds = {each.version for each in allowed.specifier}
    assert bounds == {min(versions, key=Version), max(versions, key=Version)}


def test_ledger_lists_differences_of_every_older_version() -> None:
    *older, _ = sorted((f.name.removeprefix("sglang-") for f in SERIES), key=Version)
    told = set(re.findall(r"^\| ([\d.]+) \|", SECTIONS["By version"], re.M))
    assert told == set(older)

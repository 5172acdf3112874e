"""The README is short, and each of its commands is run by a test."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.starting import ROOT
from tests.support import readme

# what no distribution is made of
NOT_BUILT = (
    ".*",
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
    "site",
    "docs",
    "tests",
    "benchmarks",
)


def source_of(test: str) -> str:
    """Return the source of a test, ``file::function``, with its decorators."""
    file, _, name = test.partition("::")
    text = (ROOT / file).read_text()
    (function,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : function.end_lineno])


def recipe_of(target: str) -> str:
    found = re.search(rf"^{target}:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found
    return found[1]


def test_readme_is_longer_than_its_limit() -> None:
    assert len(readme.README.read_text().splitlines()) <= 150


def test_block_of_the_readme_is_neither_run_nor_output() -> None:
    assert {language for language, _ in readme.blocks()} <= {"sh", "python", "text"}


def test_command_of_the_readme_is_run_by_no_test() -> None:
    found = [shlex.join(words) for words in readme.commands()]
    by_program = ("sglang serve", "curl")
    assert {
        next((each for each in by_program if text.startswith(each)), text) for text in found
    } == readme.RUN_BY.keys()


@pytest.mark.parametrize(("command", "test"), readme.RUN_BY.items(), ids=readme.RUN_BY)
def test_test_of_a_command_runs_another_one(command: str, test: str) -> None:
    if test == readme.CI:
        assert command in (ROOT / test).read_text().splitlines()
        return
    program, *words = command.split()
    if program == "make":
        # its test has the options that make the run short
        module = re.search(r"python -m examples\.(\w+)", recipe_of(words[0]))
        assert module
        named = module[1]
    elif program == "sglang-inflight":
        named = words[-1]
    else:
        named = " ".join([program, *words[:1]])
    assert f'"{named}"' in source_of(test)


def test_code_of_the_readme_is_run_by_no_test() -> None:
    code = [text for language, text in readme.blocks() if language == "python"]
    parts = [[part for part in readme.CODE_RUN_BY if part in text] for text in code]
    assert sorted(parts) == sorted([part] for part in readme.CODE_RUN_BY)
    for part, test in readme.CODE_RUN_BY.items():
        assert part in source_of(test)


@pytest.mark.parametrize(
    "words",
    [words for words in readme.commands() if shlex.join(words[:2]) == "pip install"],
    ids=shlex.join,
)
def test_readmes_installation_fails_in_a_clone(words: list[str], tmp_path: Path) -> None:
    """Dependencies are left out: they are installed here, and come from a network."""
    clone, target = tmp_path / "clone", tmp_path / "target"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(*NOT_BUILT))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    done = subprocess.run(
        [sys.executable, "-m", *words, *options],
        cwd=clone,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len([*target.glob("*.dist-info")]) == len(words) - 2

"""A contributor's checks: before a commit, at the forge, and of a part of the tests."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from harness.porting import __main__ as porting
from harness.starting import ROOT
from tests.support.part import NoPart, select
from tests.support.servers import LONG

MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def recipe(target: str) -> list[str]:
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert found is not None
    return [line.strip() for line in found[1].replace("$(BIN)", ".venv/bin").splitlines()]


def test_hooks_before_a_commit_run_what_lint_runs() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    assert [each["entry"] for each in local["hooks"]] == recipe("lint")
    for each in local["hooks"]:
        assert (each["language"], each["pass_filenames"], each["always_run"]) == (
            "system",
            False,
            True,
        )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_runs_targets_of_the_makefile_alone(path: Path) -> None:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert len(commands) == len(jobs)
    for command in commands:
        make, target, *_ = command.split()
        assert make == "make"
        assert recipe(target)


def test_workflows_and_the_image_name_no_host() -> None:
    assert WORKFLOWS
    image = ROOT / "Dockerfile"
    assert not [path for path in (*WORKFLOWS, image) if "://" in path.read_text()]
    (base,) = re.findall(r"^ARG BASE=(\S+)$", image.read_text(), re.MULTILINE)
    named = [base, *re.findall(r"BASE=(\S+) --tag", image.read_text())]
    assert not [name for name in named if "/" in name and "." in name.partition("/")[0]]


def test_each_command_of_the_guide_is_a_target() -> None:
    targets = {*re.findall(r"\bmake ([a-z][a-z-]*)", CONTRIBUTING)}
    assert {"unit", "test", "lint"} <= targets
    assert [target for target in targets if not recipe(target)] == []


def test_each_test_that_the_guide_names_exists() -> None:
    named = re.findall(r"`(test_\w+)`", CONTRIBUTING)
    assert named
    for name in named:
        assert select(name)


def test_guides_worked_example_fits_the_code() -> None:
    """Its commands find the sentence that they replace, and the test that reads it."""
    changes = re.findall(r"sed -i 's/(.+?)/(.+?)/' (\S+)", CONTRIBUTING)
    assert len(changes) == 2
    (old, new, module), (read, _, test) = changes
    assert (ROOT / module).read_text().count(old) == 1
    assert (ROOT / test).read_text().count(read) == 1
    assert new not in (ROOT / module).read_text()
    (part,) = {*re.findall(r"make test PART=(test_\w+_\w+)\n", CONTRIBUTING)}
    assert select(part) == [f"{test}::{part}"]


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ("", []),
        ("tests/unit", ["tests/unit"]),
        ("tests/unit/test_docs.py::test_named_files_exist", None),
        ("saves", ["tests/extensions/saves"]),
        ("test_docs.py", ["tests/unit/test_docs.py"]),
        ("docs", ["tests/unit/test_docs.py"]),
        ("test_named_files_exist", ["tests/unit/test_docs.py::test_named_files_exist"]),
    ],
)
def test_part_of_the_tests_is_found_by_path_or_name(part: str, found: list[str] | None) -> None:
    assert select(part) == ([part] if found is None else found)


def test_unknown_part_of_the_tests_is_refused() -> None:
    with pytest.raises(NoPart, match="'no_such_thing'"):
        select("no_such_thing")


def test_longest_files_of_unit_tests_exist() -> None:
    assert not [name for name in LONG if not (ROOT / "tests" / "unit" / f"{name}.py").exists()]


def test_newest_version_is_the_one_that_pip_names_first(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "sglang (0.9.1)\nAvailable versions: 0.9.1, 0.9.0\n"
    done = subprocess.CompletedProcess([], 0, stdout=said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert porting.newest() == "0.9.1"

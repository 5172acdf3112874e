"""The two distributions: a server's wheel has no tool, and is enough for a server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from harness.starting import ROOT

# imports of an installation of the wheel alone; the environment has the tools, too
INSTALL = """
import sys
sys.modules["sglang_inflight_tools"] = None
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang_inflight
from sglang_inflight import plugin
print(sglang_inflight.__file__, plugin.is_installed())
"""


ABOUT = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")
SERVER, TOOLS = ROOT, ROOT / "tools"
# what the wheel of each folder is made of
SOURCES = {
    SERVER: (*ABOUT, "setup.py", "sglang_inflight", "patches"),
    TOOLS: (*ABOUT, "sglang_inflight_tools"),
}


def project(folder: Path) -> Any:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def build(source: Path, folder: Path) -> zipfile.ZipFile:
    """Build the wheel of a copy: an earlier build would leave its files in the tree."""
    copy = folder / "source"
    copy.mkdir()
    for name in SOURCES[source]:
        if (source / name).is_dir():
            shutil.copytree(source / name, copy / name)
        else:
            shutil.copy(source / name, copy)
    code = "from setuptools import build_meta; build_meta.build_wheel('..')"
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=240)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build(SERVER, tmp_path_factory.mktemp("server"))


def tops(wheel: zipfile.ZipFile) -> set[str]:
    """Return the top folders, without the version of the metadata's."""
    return {re.sub("-.*", "", name.partition("/")[0]) for name in wheel.namelist()}


def modules(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if name.endswith(".py")}


def test_servers_wheel_has_the_package_and_the_patches_alone(wheel: zipfile.ZipFile) -> None:
    assert tops(wheel) == {"sglang_inflight"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "sglang_inflight").rglob("*.py")}
    assert modules(wheel) == sources
    patches = [name for name in wheel.namelist() if name.startswith("sglang_inflight/_patches/")]
    assert len([name for name in patches if name.endswith(".patch")]) == len(
        [*ROOT.glob("patches/*/*.patch")]
    )


def test_tools_wheel_has_the_tools_alone(tmp_path: Path) -> None:
    wheel = build(TOOLS, tmp_path)
    assert tops(wheel) == {"sglang_inflight_tools"}
    sources = {str(path.relative_to(TOOLS)) for path in (TOOLS / "sglang_inflight_tools").iterdir()}
    assert modules(wheel) == {name for name in sources if name.endswith(".py")}


def test_servers_wheel_alone_installs_the_plugin(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", INSTALL],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "SGLANG_PLUGINS": "inflight"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    expected = f"{tmp_path}/sglang_inflight/__init__.py True"
    assert done.stdout.splitlines()[-1:] == [expected], done.stderr[-2000:]


def test_tools_need_the_server_of_their_version() -> None:
    ours, tools = project(SERVER), project(TOOLS)
    assert ours["version"] == tools["version"]
    assert tools["dependencies"] == [f"sglang-inflight=={ours['version']}"]


@pytest.mark.parametrize("folder", [SERVER, TOOLS], ids=["server", "tools"])
def test_environment_has_the_entry_points_of_this_tree(folder: Path) -> None:
    """A stale environment would test another tree's: make .venv/.ready mends it."""
    declared = project(folder)
    groups = {**declared.get("entry-points", {}), "console_scripts": declared.get("scripts", {})}
    installed = distribution(declared["name"]).entry_points
    assert {(each.group, each.name, each.value) for each in installed} == {
        (group, name, value) for group, each in groups.items() for name, value in each.items()
    }

"""The three distributions: the server's, the client's, and the tools'."""

from __future__ import annotations

import ast
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
from sglang_inflight.vocabulary.version import VERSION
from tests.support import forked

# imports of an installation of the wheel alone; a fork has this tree's modules and the tools, too
INSTALL = """
import os, sys
# not earlier: SGLang's import reads it, too, and a fork has that behind it
os.environ["SGLANG_PLUGINS"] = "inflight"
for name in [name for name in sys.modules if name.startswith("sglang_inflight")]:
    del sys.modules[name]
sys.modules["sglang_inflight_tools"] = None
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang_inflight
from sglang_inflight import plugin
print(sglang_inflight.__file__, plugin.is_installed())
"""


SERVER, CLIENT, TOOLS = ROOT, ROOT / "client", ROOT / "tools"
FOLDERS = (SERVER, CLIENT, TOOLS)
# what the three wheels are made of
SOURCES = (
    *(folder.relative_to(ROOT) / name for folder in FOLDERS for name in
      ("pyproject.toml", "README.md", "LICENSE", "NOTICE")),
    Path("setup.py"), Path("client/setup.py"),
    Path("sglang_inflight"), Path("patches"), Path("tools/sglang_inflight_tools"),
)  # fmt: skip
PACKAGE = ROOT / "sglang_inflight"
# says by itself that the server's distribution is missing
LATE = {"sglang_inflight/cli/local.py": {"sglang_inflight.livepatch"}}


def project(folder: Path) -> Any:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree: an earlier build would leave its files in the tree."""
    copy = tmp_path_factory.mktemp("copy")
    for name in SOURCES:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


def build(copy: Path, folder: Path) -> zipfile.ZipFile:
    """Build the wheel of a folder of the tree."""
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    at = copy / folder.relative_to(ROOT)
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=at, check=True, capture_output=True, timeout=240)
    (wheel,) = (at / "dist").glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def server_wheel(copy: Path) -> zipfile.ZipFile:
    return build(copy, SERVER)


@pytest.fixture(scope="module")
def client_wheel(copy: Path) -> zipfile.ZipFile:
    return build(copy, CLIENT)


def files(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def tops(wheel: zipfile.ZipFile) -> set[str]:
    """Return the top folders beside the metadata's."""
    return {name.partition("/")[0] for name in files(wheel)}


def modules(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if name.endswith(".py")}


def test_server_and_client_have_the_package_and_no_file_twice(
    server_wheel: zipfile.ZipFile, client_wheel: zipfile.ZipFile
) -> None:
    assert tops(server_wheel) == tops(client_wheel) == {"sglang_inflight"}
    assert not files(server_wheel) & files(client_wheel)
    sources = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    assert modules(server_wheel) | modules(client_wheel) == sources
    assert files(client_wheel) - modules(client_wheel) == {
        "sglang_inflight/py.typed",
        "sglang_inflight/extensions/front/page.html",
    }


def test_servers_wheel_has_the_patches(server_wheel: zipfile.ZipFile) -> None:
    below = "sglang_inflight/_patches/"
    patches = {f"{below}{path.relative_to(ROOT / 'patches')}" for path in ROOT.glob("patches/*/*")}
    assert patches == {name for name in server_wheel.namelist() if name.endswith(".patch")}


def test_clients_modules_import_no_module_of_the_server(client_wheel: zipfile.ZipFile) -> None:
    ours = {name.removesuffix(".py").removesuffix("/__init__") for name in modules(client_wheel)}
    found = {}
    for name in modules(client_wheel):
        imported = {
            module
            for node in ast.walk(ast.parse(client_wheel.read(name)))
            for module in _imported(node)
            if module.partition(".")[0] == PACKAGE.name
        }
        if others := {each for each in imported if each.replace(".", "/") not in ours}:
            found[name] = others
    assert found == LATE


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


def test_tools_wheel_has_the_tools_alone(copy: Path) -> None:
    wheel = build(copy, TOOLS)
    assert tops(wheel) == {"sglang_inflight_tools"}
    sources = {str(path.relative_to(TOOLS)) for path in (TOOLS / "sglang_inflight_tools").iterdir()}
    assert modules(wheel) == {name for name in sources if name.endswith(".py")}


def test_server_and_clients_wheel_alone_install_the_plugin(
    server_wheel: zipfile.ZipFile, client_wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    server_wheel.extractall(tmp_path)
    client_wheel.extractall(tmp_path)
    env = {"PYTHONPATH": str(tmp_path)}
    said = forked.run(["-c", INSTALL], env=env, cwd=tmp_path, wait_s=240)
    assert said.splitlines()[-1:] == [f"{tmp_path}/sglang_inflight/__init__.py True"]


def test_distributions_need_each_other_in_one_version() -> None:
    assert {project(folder)["version"] for folder in FOLDERS} == {VERSION}
    assert f"sglang-inflight-client=={VERSION}" in project(SERVER)["dependencies"]
    assert project(TOOLS)["dependencies"] == [f"sglang-inflight=={VERSION}"]


def test_client_needs_neither_sglang_nor_torch() -> None:
    declared = project(CLIENT)
    extras = [need for needs in declared["optional-dependencies"].values() for need in needs]
    names = {re.split(r"[<>=~!\[ ;]", need)[0] for need in [*declared["dependencies"], *extras]}
    assert not names & {"sglang", "sglang-inflight", "torch", "transformers"}


@pytest.mark.parametrize("folder", FOLDERS, ids=["server", "client", "tools"])
def test_environment_has_the_entry_points_of_this_tree(folder: Path) -> None:
    """A stale environment would test another tree's: make .venv/.ready mends it."""
    declared = project(folder)
    groups = {**declared.get("entry-points", {}), "console_scripts": declared.get("scripts", {})}
    installed = distribution(declared["name"]).entry_points
    assert {(each.group, each.name, each.value) for each in installed} == {
        (group, name, value) for group, each in groups.items() for name, value in each.items()
    }

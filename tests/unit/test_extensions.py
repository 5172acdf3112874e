"""The border: the core knows no extension, and extensions know each other only by declaration."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.starting import ROOT
from sglang_inflight import extension, joints, unsupported
from sglang_inflight.extension import Extension, all_extensions
from sglang_inflight.joints import Joint
from sglang_inflight.plugin import hook_modules
from sglang_inflight.settings import kinds
from tests.unit.test_import_circles import PACKAGE, imports_of, name_of

FOLDER = f"{PACKAGE}.extensions"
BY_NAME = {each.name: each for each in all_extensions()}
MODULES = {name_of(path): path for path in (ROOT / PACKAGE).rglob("*.py")}


def extension_of(name: str) -> str | None:
    """Return the extension with the module ``name``."""
    below = name.removeprefix(f"{FOLDER}.")
    return None if below == name else below.partition(".")[0]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_module_imports_no_extension_but_its_own_and_declared_ones(name: str) -> None:
    own = extension_of(name)
    imported = {extension_of(each) for each in imports_of(MODULES[name])} - {None, own}
    allowed = set() if own is None else set(BY_NAME[own].requires)
    assert imported <= allowed


def test_each_folder_is_an_extension_of_its_name() -> None:
    folders = {path.name for path in (ROOT / PACKAGE / "extensions").iterdir() if path.is_dir()}
    assert set(BY_NAME) == folders - {"__pycache__"}


@pytest.mark.parametrize("each", all_extensions(), ids=lambda each: each.name)
def test_modules_of_an_extension_lie_in_its_folder(each: Extension) -> None:
    named = [*each.modules, *each.late_modules.values()]
    assert named
    assert {extension_of(name) for name in named} == {each.name}


def test_no_two_settings_have_one_name() -> None:
    names = [name for kind in kinds() for name in kind.__dataclass_fields__]
    assert len(names) == len(set(names))


def test_core_starts_without_the_extensions_folders(tmp_path: Path) -> None:
    """Import all modules with hooks where no extension's folder is."""
    core = tmp_path / PACKAGE
    core.mkdir()
    for path in (ROOT / PACKAGE).iterdir():
        if path.name != "extensions":
            (core / path.name).symlink_to(path)
    (core / "extensions").mkdir()
    code = (
        "from sglang_inflight.extension import all_extensions\n"
        "from sglang_inflight.plugin import every_hook\n"
        "print(len(all_extensions()), len(every_hook()) > 50)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.split()[-2:] == ["0", "True"], done.stderr


def test_extension_without_a_required_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "__file__", str(tmp_path / "extension.py"))
    (tmp_path / "extensions" / "transparent").mkdir(parents=True)
    (tmp_path / "extensions" / "transparent" / "__init__.py").touch()
    module = importlib.import_module(f"{FOLDER}.transparent")
    needy = Extension(name="transparent", requires=("no_such_extension",))
    monkeypatch.setattr(module, "EXTENSION", needy)
    with pytest.raises(ValueError, match="transparent requires no_such_extension"):
        all_extensions.__wrapped__()


def test_joint_calls_only_functions_of_composed_modules_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joints, "_joints", [])
    joint: Joint[object] = Joint("a joint")  # type: ignore[type-var]

    def first() -> None: ...
    def second() -> None: ...
    def absent() -> None: ...

    first.__module__, second.__module__, absent.__module__ = "json", "shutil", "csv"
    joint.join(order=2)(second)
    joint.join(order=1)(first)
    joint.join()(absent)
    with pytest.raises(ValueError, match="json joins a joint twice in order 1"):
        joint.join(order=1)(first)
    assert [*joint] == []
    joints.compose(["json", "shutil"])
    assert [*joint] == [first, second]


def test_hook_modules_leave_out_what_needs_an_absent_library() -> None:
    left_out = set(hook_modules()) - set(hook_modules(without={"ray"}))
    assert {extension_of(name) for name in left_out} == {"ray"}


@pytest.mark.parametrize("argument", unsupported.ALONE)
def test_server_that_needs_an_absent_extension_is_refused(
    argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: Any = {
        "disaggregation_mode": "decode",
        "enable_lora": True,
        "nnodes": 2,
        "tokenizer_worker_num": 2,
        "use_ray": True,
    }
    arguments: Any = SimpleNamespace(**{**unsupported.ALONE, argument: values[argument]})
    assert unsupported._why_not_alone(arguments) is None
    rest = tuple(each for each in all_extensions() if argument not in each.serves)
    monkeypatch.setattr(unsupported, "all_extensions", lambda: rest)
    why = unsupported._why_not_alone(arguments)
    assert why is not None
    assert f"needs {argument}={unsupported.ALONE[argument]!r} here" in why

"""The border: the core knows no extension, and extensions know each other only by declaration."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from harness.starting import ROOT
from sglang_inflight import extension, joints, unsupported
from sglang_inflight.extension import Extension, all_extensions
from sglang_inflight.hooking import hooks_of
from sglang_inflight.joints import Joint
from sglang_inflight.plugin import every_hook, hook_modules
from sglang_inflight.settings import PREFIX, Settings, kinds
from sglang_inflight.vocabulary.errors import BadSetting
from tests.support import extension_folders, forked
from tests.unit.test_import_circles import PACKAGE, imports_of, name_of

FOLDER = f"{PACKAGE}.extensions"
TESTS = ROOT / "tests"
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


# tests of the core that need an extension for a part of what they check
OF_BOTH = {
    "support/front_end.py",
    "unit/test_boundary.py",
    "unit/test_caller_disconnects.py",
    "unit/test_doors.py",
    "unit/test_request_checks.py",
    "unit/test_silent_ranks.py",
    "unit/test_staging_states.py",
}


def test_tests_outside_of_an_extensions_folder_do_without_it() -> None:
    """Without the folder of an extension, pytest can collect all tests but the extension's."""
    needed = {}
    for path in TESTS.rglob("*.py"):
        if str(path.relative_to(TESTS)) in OF_BOTH:
            continue
        below = path.relative_to(TESTS).parts
        own = below[1] if below[0] == "extensions" and len(below) > 2 else None
        top = [each for each in ast.parse(path.read_text()).body if type(each) is ast.ImportFrom]
        imported = {extension_of(f"{each.module}.") for each in top} - {None, own}
        needed[str(path)] = imported - (set() if own is None else set(BY_NAME[own].requires))
    assert len(needed) > 1
    assert {path: names for path, names in needed.items() if names} == {}


def test_each_folder_is_an_extension_of_its_name() -> None:
    folders = {path.name for path in (ROOT / PACKAGE / "extensions").iterdir() if path.is_dir()}
    assert set(BY_NAME) == folders - {"__pycache__"}


@pytest.mark.parametrize("each", all_extensions(), ids=lambda each: each.name)
def test_modules_of_an_extension_lie_in_its_folder(each: Extension) -> None:
    of_commands = [place.partition(":")[0] for place in each.commands.values()]
    named = [*each.modules, *each.late_modules.values(), *of_commands]
    assert named
    assert {extension_of(name) for name in named} == {each.name}


def test_no_module_of_the_core_joins_a_joint() -> None:
    """Only the functions of extensions that are on take part: the core's would be left out."""
    assert every_hook()
    joining = {module for joint in joints._joints for _, module in joint._declared}
    of_core = {name for name in MODULES if extension_of(name) is None}
    assert not joining & of_core


def test_no_two_settings_have_one_name() -> None:
    names = [name for kind in kinds() for name in kind.__dataclass_fields__]
    assert len(names) == len(set(names))


def those_that_require(name: str) -> set[str]:
    """Return the extension and all that cannot be there without it."""
    needy = {each.name for each in all_extensions() if name in each.requires}
    return {name}.union(*map(those_that_require, needy))


# copies of the package by name: extensions left out, and environment
COPIES: dict[str, tuple[set[str], dict[str, str]]] = {
    **{name: (those_that_require(name), {}) for name in BY_NAME},
    "all": ({*BY_NAME}, {}),
    "switched off": (set(), {"SGLANG_INFLIGHT_EXTENSIONS": "none"}),
    "some switched off": (set(), {"SGLANG_INFLIGHT_EXTENSIONS": "nodes,saves"}),
}


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``extension_folders.look`` finds in each of ``COPIES``."""
    asked = [([*BY_NAME.keys() - left_out], env) for left_out, env in COPIES.values()]
    arguments = ["-m", extension_folders.__name__, str(tmp_path_factory.mktemp("copies"))]
    with patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            del os.environ[name]
        said = forked.run(arguments, said=json.dumps(asked), wait_s=240)
    return dict(zip(COPIES, json.loads(said.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", [*BY_NAME, "all"])
def test_package_without_an_extensions_folder_has_all_other_hooks(
    name: str, copies: dict[str, Any]
) -> None:
    left_out, _ = COPIES[name]
    others = [module for module in hook_modules() if extension_of(module) not in left_out]
    hooks = [[target, kind.name] for target, _, kind in hooks_of(others)]
    assert sorted(copies[name]["hooks"]) == sorted(hooks)
    # their own settings switch on three of them
    by_setting = {"replay", "transparent", "vllm"}
    assert {*copies[name]["on"]} == BY_NAME.keys() - left_out - by_setting


@pytest.mark.parametrize(
    ("name", "on"), [("switched off", []), ("some switched off", ["nodes", "saves"])]
)
def test_extension_that_is_switched_off_imports_no_module(
    name: str, on: list[str], copies: dict[str, Any]
) -> None:
    assert copies[name]["on"] == on
    importing = {each.rpartition(".")[0] for each in copies[name]["imported"]}
    assert importing == {FOLDER} | {f"{FOLDER}.{each}" for each in on}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"EXTENSIONS": "saves,swaps"}, "no extension swaps; there are .*adapters, .*saves"),
        ({"EXTENSIONS": "none,saves"}, "no extension none"),
        ({"EXTENSIONS": "workers,saves"}, "workers requires aborts, adapters"),
        (
            {"EXTENSIONS": "saves", "VLLM_ROUTES": "1"},
            "VLLM_ROUTES is a setting of vllm, which SGLANG_INFLIGHT_EXTENSIONS leaves out",
        ),
    ],
)
def test_impossible_choice_of_extensions_is_refused(given: dict[str, str], why: str) -> None:
    environ = {PREFIX + name: value for name, value in given.items()}
    with pytest.raises(BadSetting, match=why):
        Settings.from_environment(environ)


def test_choice_of_extensions_is_read_once_for_all_spellings() -> None:
    for text, names in (("", ()), ("none", ()), (" saves, nodes", ("nodes", "saves"))):
        assert Settings.from_environment({f"{PREFIX}EXTENSIONS": text}).extensions == names
    assert Settings.from_environment({}).extensions is None


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


def test_api_document_lists_every_extension() -> None:
    table = (
        (ROOT / "docs" / "reference" / "settings.md").read_text().partition("## Extensions\n")[2]
    )
    rows = re.findall(r"^\| `(\w+)`(?: \(requires (.*)\))? \|", table.partition("\n#")[0], re.M)
    assert {name: tuple(re.findall(r"`(\w+)`", others)) for name, others in rows} == {
        each.name: each.requires for each in all_extensions()
    }


def test_architecture_lists_every_joint() -> None:
    joints_of = {
        (name, str(path.relative_to(ROOT / PACKAGE)))
        for path in MODULES.values()
        for name in re.findall(r"^(\w+): Joint\[", path.read_text(), re.MULTILINE)
    }
    table = (ROOT / "docs" / "architecture.md").read_text().partition("| joint |")[2]
    assert {*re.findall(r"^\| `(\w+)` \| `(\S+)` \|", table, re.MULTILINE)} == joints_of


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
    monkeypatch.setattr(unsupported, "extensions_on", lambda: rest)
    why = unsupported._why_not_alone(arguments)
    assert why is not None
    assert f"needs {argument}={unsupported.ALONE[argument]!r} here" in why

"""A survey of an SGLang names each misfit and its new place."""

from __future__ import annotations

import re
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.porting import Finding, Kind
from harness.porting import __main__ as command
from harness.porting.patches import look_at_patches
from harness.porting.survey import Survey, Whereabouts, nearest_series
from harness.porting.uses import look_at_uses
from sglang_inflight.livepatch import PatchRefused, Series, read_series, supported_versions
from sglang_inflight_tools.parameters import Parameters
from sglang_inflight_tools.source_tree import SourceTree
from sglang_inflight_tools.targets import why_not_hooked

Grow = Callable[[str], SourceTree]

MODULE = """
from dataclasses import dataclass
from sglang.base import Base, helper as assistant

KNOWN = 1

class Thing(Base):
    table: dict[str, int]

    def __init__(self, first):
        self.first = first
        self.second, (self.third, _) = 2, (3, 4)
        with open(first) as self.file:
            self.table["x"] = first.unseen = 5

    @property
    def fixed(self):
        return 1

    @property
    def free(self):
        return 1

    @free.setter
    def free(self, value):
        pass

    async def later(self, obj, request=None):
        pass

    @staticmethod
    def free_of_self(obj):
        pass

def build(first, second=2, *, third):
    pass
"""
BASE = """
class Base:
    def start(self, at, *, twice=False):
        self.started = at

def helper():
    pass
"""


@pytest.fixture
def grow(tmp_path: Path) -> Grow:
    def write(text: str) -> SourceTree:
        package = tmp_path / "sglang"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text("from .thing import *\n")
        (package / "thing.py").write_text(textwrap.dedent(text))
        (package / "base.py").write_text(BASE)
        return SourceTree(tmp_path)

    return write


# ---- source ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "sglang.thing.Thing.first",
        "sglang.thing.Thing.third",
        "sglang.thing.Thing.file",
        "sglang.thing.Thing.started",
        "sglang.Thing.table",
        "sglang.thing.assistant",
        "sglang.thing.dataclass",
        "sglang.KNOWN",
        "sglang.base",
    ],
)
def test_name_is_found_in_source(grow: Grow, name: str) -> None:
    assert grow(MODULE).find(name) is not None


@pytest.mark.parametrize(
    "name",
    ["sglang.thing.Thing.unseen", "sglang.thing.Thing._", "sglang.other", "sglang.thing.helper"],
)
def test_missing_name_is_not_found(grow: Grow, name: str) -> None:
    assert grow(MODULE).find(name) is None


def test_imported_name_is_found_in_its_module(grow: Grow) -> None:
    found = grow(MODULE).find("sglang.thing.assistant")
    assert found is not None
    assert found.module == "sglang.base"


# ---- hooks -------------------------------------------------------------------------


def before(thing: object, at: int, *args: Any, **kwargs: Any) -> None: ...
def renamed(thing: object, when: int, *, twice: bool = False) -> None: ...
def without_twice(thing: object, at: int) -> None: ...
def around(start: object, thing: object, at: int, *, twice: bool = False) -> None: ...
def of_a_function(first: int, second: int = 2, *, third: int) -> None: ...
def wants_more(thing: object, at: int, more: int, *, twice: bool = False) -> None: ...


@pytest.mark.parametrize(
    ("target", "hook", "kind", "reason"),
    [
        ("Thing.start", before, "BEFORE", None),
        ("Thing.start", around, "AROUND", None),
        ("build", of_a_function, "REPLACE", None),
        ("Thing.start", renamed, "REPLACE", "its parameter 1 is 'at', our hook's is 'when'"),
        ("Thing.start", without_twice, "REPLACE", "our hook does not take its twice"),
        ("Thing.start", wants_more, "REPLACE", "it has no more, needed by our hook"),
        ("Thing.begin", before, "BEFORE", "it is not there"),
        ("Thing.first", before, "BEFORE", "it is no function there"),
    ],
)
def test_hook_misfits_are_named(
    grow: Grow, target: str, hook: Callable[..., Any], kind: str, reason: str | None
) -> None:
    ours = Parameters.of_function(hook)
    assert why_not_hooked(grow(MODULE), f"sglang.thing.{target}", ours, kind) == reason


# ---- uses --------------------------------------------------------------------------

OURS = """
from sglang.thing import Thing, build

def use(thing: Thing) -> None:
    thing.start(1, twice=True)
    thing.table["x"] = 1
    build(1, third=3)
"""


@pytest.fixture
def house(tmp_path: Path) -> Path:
    house = tmp_path / "repository" / "ours"
    house.mkdir(parents=True)
    (house / "__init__.py").touch()
    (house / "module.py").write_text(OURS)
    return house


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", {}),
        ("table: dict[str, int]", "rows: dict[str, int]", {6: "thing.table"}),
        ("third):", "third, fourth):", {7: "sglang.thing.build"}),
        ("def build", "def make", {2: "sglang.thing.build"}),
    ],
)
def test_broken_uses_are_named(
    grow: Grow, house: Path, tmp_path: Path, old: str, new: str, found: dict[int, str]
) -> None:
    """mypy reads the changed source and needs nothing installed."""
    root = grow(MODULE.replace(old, new)).root
    findings = look_at_uses(root, "9.9", tmp_path / "cache", house, beside=())
    assert [(f.kind, f.name) for f in findings] == [
        ("use", f"ours/module.py:{line}") for line in found
    ]
    for finding, name in zip(findings, found.values(), strict=True):
        assert name.rpartition(".")[2] in str(finding.reason)


def test_missing_module_is_a_broken_use(grow: Grow, house: Path, tmp_path: Path) -> None:
    root = grow(MODULE).root
    (root / "sglang" / "thing.py").rename(root / "sglang" / "things.py")
    (finding,) = look_at_uses(root, "9.9", tmp_path / "cache", house, beside=())
    assert (finding.name, finding.upstream) == ("ours/module.py:2", ("sglang.thing",))


# ---- patches -----------------------------------------------------------------------

LOOP = """\
def first():
    a = 1
    b = 2
    c = 3


def second():
    a = 1
    b = 2
    c = 3
"""
PATCH = """\
--- a/sglang/thing.py
+++ b/sglang/thing.py
@@ -2,3 +2,3 @@
     a = 1
-    b = 2
+    b = 20
     c = 3
@@ -8,3 +8,3 @@
     a = 1
-    b = 2
+    b = 20
     c = 3
"""


@pytest.fixture
def series(tmp_path: Path) -> Series:
    folder = tmp_path / "patches" / "sglang-1.0"
    folder.mkdir(parents=True)
    (folder / "0001-twenty.patch").write_text(PATCH)
    return read_series("1.0", patches=tmp_path / "patches")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LOOP, []),
        (f"\n\n{LOOP}", ["hunk 1 is at line 4, not at 2", "hunk 2 is at line 10, not at 8"]),
        (
            LOOP.replace("b = 2\n    c = 3\n\n", "b = 2\n    c = 4\n\n"),
            ["hunk 1 does not fit", "(first) 'c = 3' is not there, perhaps 'c = 4' now"],
        ),
    ],
)
def test_patch_misfits_are_named(grow: Grow, series: Series, text: str, said: list[str]) -> None:
    (finding,) = look_at_patches(series, grow(text).root)
    assert finding.fits is (not said)
    assert [words for words in said if words not in (finding.reason or "")] == []


def test_patch_of_a_missing_file_is_named(grow: Grow, series: Series) -> None:
    root = grow(LOOP).root
    (root / "sglang" / "thing.py").unlink()
    (finding,) = look_at_patches(series, root)
    assert finding.reason == "sglang/thing.py is not there"


def test_patch_of_ambiguous_function_is_named(grow: Grow, series: Series) -> None:
    """Two functions of one name: the hunks fit, and no server would start."""
    *_, last = look_at_patches(series, grow(LOOP.replace("second", "first")).root)
    assert last.reason is not None
    assert "defined more than once" in last.reason


def test_unsupported_version_is_told_supported_ones(tmp_path: Path, series: Series) -> None:
    (tmp_path / "patches" / "sglang-0.9").mkdir()
    with pytest.raises(PatchRefused, match=re.escape("the patches are for sglang 0.9 or 1.0")):
        read_series("0.8", patches=tmp_path / "patches")


@pytest.mark.parametrize(
    ("version", "taken"),
    [("0.1", supported_versions()[0]), ("99.0", supported_versions()[-1])]
    + [(each, each) for each in supported_versions()],
)
def test_new_version_uses_nearest_series(version: str, taken: str) -> None:
    assert nearest_series(version).version == taken


# ---- the report --------------------------------------------------------------------


def test_survey_suggests_new_places(grow: Grow) -> None:
    look = Whereabouts(grow(MODULE))
    assert look.of("sglang.thing.Thing.first") == []
    assert look.of("sglang.thing.Thing.star") == ["Thing has start, started"]
    assert look.of("sglang.thing.helper") == ["sglang/base.py:6: def helper"]
    assert look.of("sglang.thingy.Thing")[0] == "sglang/thing.py:7: class Thing"


def test_survey_report_lists_misfits() -> None:
    findings = (Finding("patch", "0001.patch", None), Finding("hook", "a.b", "it is not there"))
    lines = command.describe(Survey("9.9", "sglang-9.8", findings, {"a.b": ["a.c:1: def b"]}))
    assert lines[0] == "SGLang 9.9, with the patches of sglang-9.8"
    assert "Patches: 1 of 1 fit" in lines
    at = lines.index("Hooks: 0 of 1 fit")
    assert lines[at + 1 : at + 3] == ["  a.b: it is not there", "    a.c:1: def b"]


@pytest.mark.parametrize(
    ("kind", "reason", "code"),
    [("hook", None, 0), ("hook", "it is not there", 1), ("test", "it is not there", 0)],
)
def test_port_exit_code(
    grow: Grow, monkeypatch: pytest.MonkeyPatch, kind: Kind, reason: str | None, code: int
) -> None:
    root = grow(MODULE).root
    found = Survey("1.0", "sglang-1.0", (Finding(kind, "a.b", reason),), {})
    monkeypatch.setattr(command, "survey", lambda *_: found)
    assert command.main(["1.0", "--source", str(root)]) == code


def test_wheel_is_fetched_once_and_only_source_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []

    def pip(words: list[str], *, check: bool) -> None:
        called.append(words)
        with zipfile.ZipFile(Path(words[words.index("--dest") + 1], "x.whl"), "w") as wheel:
            wheel.writestr("sglang/__init__.py", "")
            wheel.writestr("sglang/kernel.so", "")

    monkeypatch.setattr("harness.porting.__main__.subprocess.run", pip)
    for _ in range(2):
        root = command.fetch("1.0", tmp_path / "cache")
    assert len(called) == 1
    assert called[0][-1] == "sglang==1.0"
    assert [path.name for path in (root / "sglang").iterdir()] == ["__init__.py"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["sglang-1.0"]

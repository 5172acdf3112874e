"""The series applier, on small packages made for each test, and on the installed SGLang."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import itertools
import shutil
import subprocess
import sys
import textwrap
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from sglang_inflight.livepatch import (
    AppliedFunction,
    PatchRefused,
    Series,
    apply_series,
    expect_hook,
    hooks,
    load_series,
    write_fork,
)

_numbers = itertools.count()


@dataclass
class House:
    """A package on ``sys.path`` with its version, and a folder of patches for it."""

    base: Path
    name: str
    version: str = "1.0"
    _patched: dict[str, str] = field(default_factory=dict)

    @property
    def patches(self) -> Path:
        return self.base / "patches"

    @property
    def folder(self) -> Path:
        return self.patches / f"{self.name}-1.0"

    def write(self, source: str, module: str = "core") -> None:
        text = textwrap.dedent(source).lstrip("\n")
        (self.base / self.name / f"{module}.py").write_text(text)
        self._patched[module] = text

    def patch(self, number: int, *changes: tuple[str, str], module: str = "core") -> str:
        """Write a patch on top of the earlier ones. Each change is a pair of old and new text."""
        before = after = self._patched[module]
        for old, new in changes:
            assert after.count(old) == 1, old
            after = after.replace(old, new)
        self._patched[module] = after
        file = f"{self.name}/{module}.py"
        name = f"{number:04}-change.patch"
        lines = difflib.unified_diff(
            before.splitlines(True), after.splitlines(True), f"a/{file}", f"b/{file}"
        )
        with (self.folder / name).open("a") as patch:
            patch.writelines(lines)
        return name

    def install_patched(self, *modules: str) -> None:
        for module in modules or self._patched:
            (self.base / self.name / f"{module}.py").write_text(self._patched[module])

    @property
    def series(self) -> Series:
        return load_series(self.name, self.patches)

    def start(self) -> ModuleType:
        """Apply the series and then the hooks, like SGLang at start."""
        self.series.apply()
        HookRegistry.apply_hooks()
        return self.module()

    def module(self, name: str = "core") -> ModuleType:
        return importlib.import_module(f"{self.name}.{name}")

    def target(self, qualname: str) -> str:
        return f"{self.name}.core.{qualname}"


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    house = House(tmp_path, f"engine{next(_numbers)}")
    (tmp_path / house.name).mkdir()
    (tmp_path / house.name / "__init__.py").touch()
    house.folder.mkdir(parents=True)
    metadata = tmp_path / f"{house.name}-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {house.name}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield house
    for name in [n for n in sys.modules if n.split(".")[0] == house.name]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start with an empty registry, and restore the old registry afterwards."""
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(HookRegistry, "apply_hooks", HookRegistry.__dict__["apply_hooks"])
    hooks.forget()
    yield
    hooks.forget()


ENGINE = """
    class Engine:
        def step(self):
            return "old"

        def stop(self):
            return "stopped"


    def helper():
        return "old helper"
"""
CHANGE = ('return "old"\n', 'return "new"\n')


def refused(start: Callable[[], object]) -> PatchRefused:
    with pytest.raises(PatchRefused) as caught:
        start()
    assert isinstance(caught.value, SystemExit), "SGLang swallows an Exception"
    return caught.value


# ---- what a patch can do


def test_method_and_function_are_patched(house: House) -> None:
    house.write(ENGINE)
    name = house.patch(1, CHANGE, ('"old helper"', '"new helper"'))
    old_class = house.module().Engine

    applied = house.series.apply()
    HookRegistry.apply_hooks()

    core = house.module()
    assert core.Engine is old_class
    assert (core.Engine().step(), core.Engine().stop(), core.helper()) == (
        "new",
        "stopped",
        "new helper",
    )
    file = f"{house.name}/core.py"
    assert applied == [
        AppliedFunction(house.target("Engine.step"), file, (name,), False),
        AppliedFunction(house.target("helper"), file, (name,), False),
    ]
    assert applied[0].qualname == "Engine.step"


def test_patching_does_not_write_installed_file(house: House) -> None:
    house.write(ENGINE)
    house.patch(1, CHANGE)
    file = house.base / house.name / "core.py"
    before = file.read_text()
    house.start()
    assert file.read_text() == before


def test_planning_imports_nothing(house: House) -> None:
    house.write(ENGINE)
    house.patch(1, CHANGE)
    assert [f.qualname for f in house.series.plan().functions] == ["Engine.step"]
    assert f"{house.name}.core" not in sys.modules


def test_traceback_shows_patched_line(house: House) -> None:
    house.write(ENGINE)
    house.patch(1, ('return "old"\n', "x = 0\n        return 1 / x  # patched\n"))
    engine = house.start().Engine()
    try:
        engine.step()
    except ZeroDivisionError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
    assert frame.filename == f"<sglang_inflight patched>/{house.name}/core.py"
    assert (frame.lineno, frame.line) == (4, "return 1 / x  # patched")
    assert frame.name == "step"


def test_patched_function_keeps_its_qualname(house: House) -> None:
    house.write(
        """
        class Outer:
            class Inner:
                def step(self):
                    def local():
                        pass
                    return None
        """
    )
    house.patch(1, ("return None", "return local"))
    local = house.start().Outer.Inner().step()
    assert local.__qualname__ == "Outer.Inner.step.<locals>.local"
    assert local.__module__ == f"{house.name}.core"


def test_patched_method_may_use_super_and_private_names(house: House) -> None:
    house.write(
        """
        class Base:
            def step(self):
                return "base"

        class Engine(Base):
            __secret = "secret"

            def step(self):
                return None
        """
    )
    house.patch(1, ("return None", "return super().step(), self.__secret, __class__"))
    core = house.start()
    assert core.Engine().step() == ("base", "secret", core.Engine)


def test_patched_decorators_and_defaults_resolve(house: House) -> None:
    house.write(
        """
        import functools

        def loudly(function):
            @functools.wraps(function)
            def wrapper(*args):
                return function(*args).upper()
            return wrapper

        class Engine:
            GREETING = "hello"
            quietly = loudly

            @quietly
            @loudly
            def step(self, greeting=GREETING):
                return greeting + " old"
        """
    )
    house.patch(1, ('greeting + " old"', 'greeting + " new"'))
    assert house.start().Engine().step() == "HELLO NEW"


def test_class_and_static_methods_are_patched(house: House) -> None:
    house.write(
        """
        class Base:
            @classmethod
            def make(cls):
                return cls.__name__

        class Engine(Base):
            @classmethod
            def make(cls):
                return None

            @staticmethod
            def twice(x):
                return x
        """
    )
    house.patch(1, ("return None", "return super().make()"), ("return x", "return x + x"))
    core = house.start()
    assert (core.Engine.make(), core.Engine.twice(2)) == ("Engine", 4)


def test_coroutines_and_async_generators_are_patched(house: House) -> None:
    house.write(
        """
        class Engine:
            async def answer(self):
                return "old"

            async def generate(self, count):
                for i in range(count):
                    yield i
        """
    )
    house.patch(1, ('"old"', '"new"'), ("yield i", "yield 10 * i"))
    engine = house.start().Engine()

    async def run() -> tuple[str, list[int]]:
        return await engine.answer(), [i async for i in engine.generate(3)]

    assert asyncio.run(run()) == ("new", [0, 10, 20])


def test_patched_function_keeps_future_annotations(house: House) -> None:
    house.write(
        """
        from __future__ import annotations

        def step(x: NotDefined) -> AlsoNot:
            return "old"
        """
    )
    house.patch(1, ('"old"', "inspect_me"), ("inspect_me", "(lambda: 0, step)[1]"))
    house.series.apply()
    ((_, function, _),) = HookRegistry._hooks[house.target("step")]
    assert inspect.get_annotations(function) == {"x": "NotDefined", "return": "AlsoNot"}


def test_two_patches_of_one_function_add_up(house: House) -> None:
    house.write(ENGINE)
    first = house.patch(1, ('return "old"\n', 'a = "one"\n        return a\n'))
    second = house.patch(2, ("return a\n", 'return a + "two"\n'))
    assert house.series.plan().functions[0].patches == (first, second)
    assert house.start().Engine().step() == "onetwo"


def test_removed_line_is_attributed_to_its_patch(house: House) -> None:
    house.write("def step():\n    x = 1\n    x = 2\n    return x\n")
    name = house.patch(1, ("    x = 2\n", ""))
    assert house.series.plan().functions[0].patches == (name,)
    assert house.start().step() == 1


def test_other_plugin_may_wrap_patched_function(house: House) -> None:
    house.write(ENGINE)
    house.patch(1, CHANGE)
    target = house.target("Engine.step")
    HookRegistry.register(target, lambda inner, self: f"<{inner(self)}>", HookType.AROUND)
    house.series.apply()
    HookRegistry.register(target, lambda result, self: result + "!", HookType.AFTER)
    HookRegistry.apply_hooks()
    HookRegistry.apply_hooks()
    assert house.module().Engine().step() == "<new>!"


# ---- refusals


def test_other_package_version_is_refused(house: House) -> None:
    house.write(ENGINE)
    house.patch(1, CHANGE)
    house.folder.rename(house.patches / f"{house.name}-2.0")
    message = str(refused(lambda: house.series))
    assert f"{house.name} 1.0" in message
    assert f"the patches are for {house.name} 2.0" in message


def test_missing_package_is_refused(house: House) -> None:
    assert "not installed" in str(refused(lambda: load_series("no_such_engine", house.patches)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param('return "old"', 'return "other"', id="removed line"),
        pytest.param("class Engine:", "class Engine(object):", id="context"),
        pytest.param("class Engine:", "\nclass Engine:", id="shifted by a line"),
        pytest.param('return "old"\n', 'return "old" \n', id="white space"),
    ],
)
def test_mismatched_source_is_refused(house: House, old: str, new: str) -> None:
    house.write(ENGINE)
    name = house.patch(1, CHANGE)
    file = house.base / house.name / "core.py"
    file.write_text(file.read_text().replace(old, new))
    refusal = refused(house.series.apply)
    assert (refusal.patch, refusal.found) == (name, f"{house.name} 1.0")
    assert name in str(refusal)
    assert f"{house.name}/core.py: line" in str(refusal)
    assert not HookRegistry._hooks


def test_refused_mismatch_names_function(house: House) -> None:
    house.write(ENGINE)
    house.patch(1, CHANGE)
    file = house.base / house.name / "core.py"
    file.write_text(file.read_text().replace('return "old"', 'return "other"'))
    refusal = refused(house.series.apply)
    assert refusal.function == "Engine.step"
    assert """is 'return "other"', the patch expects 'return "old"'""" in str(refusal)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("def step(self):", "def step(self, x=1):", id="signature"),
        pytest.param(
            "    def step(self):", "    @staticmethod\n    def step(self):", id="decorator"
        ),
        pytest.param("def step(self):", "async def step(self):", id="kind"),
        pytest.param("class Engine:", "import os\nclass Engine:", id="import"),
        pytest.param("class Engine:", "class Engine(dict):", id="base"),
        pytest.param("class Engine:\n", "class Engine:\n    field = 1\n\n", id="field"),
        pytest.param("\n\ndef helper", "\n\ndef more():\n    pass\n\n\ndef helper", id="function"),
        pytest.param('"old helper"\n', '"old helper"\n\n\nlast = 1\n', id="end of the module"),
        pytest.param('    def stop(self):\n        return "stopped"\n', "", id="removed method"),
    ],
)
def test_patch_outside_function_bodies_is_refused(house: House, old: str, new: str) -> None:
    house.write(ENGINE)
    name = house.patch(1, (old, new))
    refusal = refused(house.series.apply)
    assert refusal.patch == name
    assert "bodies of functions" in str(refusal)


def test_refusal_names_patch_outside_function_bodies(house: House) -> None:
    house.write(ENGINE)
    house.patch(1, CHANGE)
    second = house.patch(2, ("def helper():", "def helper(x):"))
    refusal = refused(house.series.apply)
    assert (refusal.patch, refusal.function) == (second, "helper")


def test_patch_of_conditional_function_is_refused(house: House) -> None:
    house.write("if True:\n    def step():\n        return 1\n")
    house.patch(1, ("return 1", "return 2"))
    assert "bodies of functions" in str(refused(house.series.apply))


def test_patch_of_a_property_is_refused(house: House) -> None:
    house.write("class Engine:\n    @property\n    def size(self):\n        return 1\n")
    house.patch(1, ("return 1", "return 2"))
    assert "cannot hook a property" in str(refused(house.series.apply))


def test_patch_of_a_name_bound_twice_is_refused(house: House) -> None:
    house.write("def step():\n    return 1\n\n\ndef step():\n    return 2\n")
    house.patch(1, ("return 1", "return 3"))
    assert "more than once" in str(refused(house.series.apply))


def test_patch_without_code_is_refused(house: House) -> None:
    house.write("# Old.\ndef step():\n    return 1\n")
    house.patch(1, ("# Old.", "# New."))
    assert "changes no function" in str(refused(house.series.apply))


def test_patch_with_syntax_error_is_refused(house: House) -> None:
    house.write(ENGINE)
    name = house.patch(1, ('return "old"\n', "return (\n"))
    refusal = refused(house.series.apply)
    assert refusal.patch == name
    assert "not valid Python" in str(refusal)


def test_patch_with_failing_decorator_is_refused(house: House) -> None:
    house.write("names = ['first']\n\n\ndef named(f):\n    names.pop()\n    return f\n\n\n"
                "@named\ndef step():\n    return 1\n")  # fmt: skip
    house.patch(1, ("return 1", "return 2"))
    assert "cannot be compiled" in str(refused(house.series.apply))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("not a diff\n", "changes no file"),
        ("--- a/x/core.py\n+++ b/x/core.py\n@@ -1,2 +1,2 @@\n-a\n", "not a unified diff"),
        ("--- /dev/null\n+++ b/x/core.py\n@@ -0,0 +1 @@\n+a\n", "adds"),
        ("--- a/x/core.py\n+++ b/x/more.py\n@@ -1 +1 @@\n-a\n+b\n", "renames"),
        ("--- a/../core.py\n+++ b/../core.py\n@@ -1 +1 @@\n-a\n+b\n", "Python modules"),
        ("--- a/x/core.py\n+++ b/x/core.py\n@@ -1,0 +2 @@\n+a\n", "no context"),
        (
            "--- a/x/core.py\n+++ b/x/core.py\n@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n",
            "without a newline",
        ),
    ],
)
def test_malformed_patch_file_is_refused(house: House, text: str, reason: str) -> None:
    (house.folder / "0001-broken.patch").write_text(text)
    refusal = refused(lambda: house.series)
    assert refusal.patch == "0001-broken.patch"
    assert reason in str(refusal)


def test_patch_of_missing_file_is_refused(house: House) -> None:
    house.write(ENGINE, "gone")
    house.patch(1, CHANGE, module="gone")
    (house.base / house.name / "gone.py").unlink()
    assert "cannot be read" in str(refused(house.series.apply))


def test_unforeseen_error_refuses_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Series) -> None:
        raise KeyError("unforeseen")

    monkeypatch.setattr(Series, "apply", fail)
    assert "unforeseen" in str(refused(apply_series))


# ---- rival plugins

RIVAL = HookSource("rival", "rival-dist")


def rival_step(self: object) -> str:
    return "rival"


class RivalEngine:
    pass


@pytest.mark.parametrize(
    ("qualname", "rival"), [("Engine.step", rival_step), ("Engine", RivalEngine)]
)
def test_earlier_replace_hook_is_refused(
    house: House, qualname: str, rival: Callable[..., object]
) -> None:
    house.write(ENGINE)
    name = house.patch(1, CHANGE)
    HookRegistry.register(house.target(qualname), rival, HookType.REPLACE, source=RIVAL)
    refusal = refused(house.series.apply)
    assert refusal.patch == name
    assert refusal.function == house.target("Engine.step")
    assert f"plugin 'rival' replaces {house.target(qualname)}" in str(refusal)


@pytest.mark.parametrize(
    ("qualname", "rival"), [("Engine.step", rival_step), ("Engine", RivalEngine)]
)
def test_later_replace_hook_is_refused(
    house: House, qualname: str, rival: Callable[..., object]
) -> None:
    house.write(ENGINE)
    house.patch(1, CHANGE)
    house.series.apply()
    HookRegistry.register(house.target(qualname), rival, HookType.REPLACE, source=RIVAL)
    refusal = refused(HookRegistry.apply_hooks)
    assert f"plugin 'rival' replaces {house.target(qualname)}" in str(refusal)


def test_replace_hook_through_an_alias_is_refused(house: House) -> None:
    """The registry knows targets by name, so the function in place is compared."""
    house.write(ENGINE)
    house.patch(1, CHANGE)
    house.write(f"from {house.name}.core import Engine\n", "zalias")
    house.series.apply()
    HookRegistry.register(f"{house.name}.zalias.Engine.step", rival_step, HookType.REPLACE)
    assert "not in place" in str(refused(HookRegistry.apply_hooks))


def test_target_hooked_before_the_series_is_refused(house: House) -> None:
    """The registry skips a target applied before, and our function with it."""
    house.write(ENGINE)
    house.patch(1, CHANGE)
    HookRegistry.register(house.target("Engine.step"), lambda result, self: result)
    HookRegistry.apply_hooks()
    house.series.apply()
    assert "not in place" in str(refused(HookRegistry.apply_hooks))


def test_registry_reset_after_the_series_is_refused(house: House) -> None:
    house.write(ENGINE)
    house.patch(1, CHANGE)
    house.series.apply()
    HookRegistry.reset()
    assert "not in place" in str(refused(HookRegistry.apply_hooks))


def test_expected_hook_is_applied(house: House) -> None:
    def louder(result: str, self: object) -> str:
        return result.upper()

    house.write(ENGINE)
    target = house.target("Engine.stop")
    HookRegistry.register(target, louder)
    expect_hook(target, louder)
    HookRegistry.apply_hooks()
    assert house.module().Engine().stop() == "STOPPED"


def test_expected_hook_without_target_is_refused(house: House) -> None:
    house.write(ENGINE)
    target = house.target("Engine.no_such_method")
    HookRegistry.register(target, rival_step)
    expect_hook(target)
    refusal = refused(HookRegistry.apply_hooks)
    assert refusal.function == target


def test_expected_hook_replaced_by_another_is_refused(house: House) -> None:
    house.write(ENGINE)
    target = house.target("Engine.stop")
    HookRegistry.register(target, lambda result, self: result)
    expect_hook(target, rival_step)
    assert refused(HookRegistry.apply_hooks).function == target


# ---- the fork


def test_fork_is_recognised_as_patched(house: House) -> None:
    house.write(ENGINE)
    first = house.patch(1, ('return "old"\n', 'a = "one"\n        return a\n'))
    second = house.patch(2, ("return a\n", 'return a + "two"\n'))
    house.install_patched()
    plan = house.series.plan()
    assert plan.already_applied
    assert house.start().Engine().step() == "onetwo"
    assert [(f.qualname, f.patches, f.in_fork) for f in plan.functions] == [
        ("Engine.step", (first, second), True)
    ]
    assert not HookRegistry._hooks


def test_replace_hook_on_a_fork_is_refused(house: House) -> None:
    house.write(ENGINE)
    house.patch(1, CHANGE)
    house.install_patched()
    house.series.apply()
    HookRegistry.register(house.target("Engine.step"), rival_step, HookType.REPLACE, source=RIVAL)
    assert "plugin 'rival'" in str(refused(HookRegistry.apply_hooks))


def test_partly_patched_source_is_refused(house: House) -> None:
    house.write(ENGINE)
    house.write(ENGINE, "more")
    house.patch(1, CHANGE)
    second = house.patch(2, CHANGE, module="more")
    house.install_patched("core")
    refusal = refused(house.series.apply)
    assert refusal.patch == second
    assert "partly patched" in str(refusal)


def test_write_fork_writes_patched_package(house: House, tmp_path: Path) -> None:
    house.write(ENGINE)
    house.write("x = 1\n", "other")
    house.patch(1, CHANGE)
    written = write_fork(tmp_path / "fork", house.series)
    copied = tmp_path / "fork" / house.name
    assert 'return "new"' in (copied / "core.py").read_text()
    assert (copied / "other.py").read_text() == "x = 1\n"
    assert [f.qualname for f in written] == ["Engine.step"]
    with pytest.raises(FileExistsError, match="not an empty folder"):
        write_fork(tmp_path / "fork", house.series)


# ---- the series for SGLang


def test_series_applies_to_installed_sglang() -> None:
    series = load_series()
    plan = series.plan()
    assert {name for f in plan.functions for name in f.patches} == {p.name for p in series.patches}


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch(1)")
def test_series_gives_same_files_as_patch(tmp_path: Path) -> None:
    series = load_series()
    plan = series.plan()
    if plan.already_applied:
        pytest.skip("the installed SGLang is a fork")
    for module in plan.modules:
        (tmp_path / module.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(module.path, tmp_path / module.file)
    for patch in sorted(series.folder.glob("*.patch")):
        subprocess.run(["patch", "-p1", "--fuzz=0", "-i", str(patch)], cwd=tmp_path, check=True)
    for module in plan.modules:
        assert (tmp_path / module.file).read_text() == module.text

"""Modules that hold a hooked function get its replacement, wherever SGLang's search finds it."""

from __future__ import annotations

import functools
import sys
from collections import Counter, defaultdict
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

import pytest
import sglang.srt.managers.scheduler  # noqa: F401
from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from harness.kept_places import KeptPlaces
from sglang_inflight.livepatch import hooks
from sglang_inflight.livepatch.places import Places, looking_once

search = hook_registry._propagate_patch


class Functions:
    """Functions in no module's names."""

    @staticmethod
    def old() -> str:
        return "old"

    @staticmethod
    def new() -> str:
        return "new"

    @staticmethod
    def newer() -> str:
        return "newer"


class Holders:
    """Modules that hold ``Functions.old`` by the name ``held``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.modules = [self.add(f"holder_{number}") for number in range(3)]

    def add(self, name: str) -> ModuleType:
        module = ModuleType(name)
        vars(module)["held"] = Functions.old
        self._monkeypatch.setitem(sys.modules, name, module)
        return module

    def held(self) -> list[str]:
        return [vars(module)["held"]() for module in self.modules]


@pytest.fixture(params=[Places, KeptPlaces])
def kind(request: pytest.FixtureRequest) -> type[Places]:
    """The index of a server's process, and the one that tests' servers find in theirs."""
    found: type[Places] = request.param
    return found


@pytest.fixture
def holders(monkeypatch: pytest.MonkeyPatch) -> Holders:
    return Holders(monkeypatch)


def test_sglangs_search_finds_no_place_left(kind: type[Places]) -> None:
    """The functions are those that most modules hold. Each gets its places back."""
    found = Counter(
        value
        for name, module in list(sys.modules.items())
        if name.startswith("sglang") and isinstance(module, ModuleType)
        for value in list(vars(module).values())
        if isinstance(value, FunctionType) and value.__module__ in sys.modules
    )
    places = kind(search)
    for value, count in found.most_common(8):
        source = sys.modules[value.__module__]
        assert places.replace(value, Functions.new, source) > count // 2
        left = search(value, Functions.new, source)
        assert places.replace(Functions.new, value, source) > count // 2
        assert (left, search(Functions.new, value, source)) == (0, 0)


def test_source_of_a_function_is_left_to_the_registry(kind: type[Places], holders: Holders) -> None:
    assert kind(search).replace(Functions.old, Functions.new, holders.modules[0]) == 2
    assert holders.held() == ["old", "new", "new"]


def test_module_imported_after_the_look_is_found(kind: type[Places], holders: Holders) -> None:
    places = kind(search)
    places.complete()
    holders.modules.append(holders.add("a_late_holder"))
    assert places.replace(Functions.old, Functions.new, None) == 4
    assert holders.held() == ["new"] * 4


def test_module_in_place_of_another_is_found(holders: Holders) -> None:
    """A module may replace itself in ``sys.modules``, whose length then stays."""
    places = Places(search)
    places.complete()
    holders.modules[1] = holders.add("holder_1")
    places.replace(Functions.old, Functions.new, None)
    assert holders.held() == ["new"] * 3


def test_another_main_module_is_found(
    kind: type[Places], holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork has a main module of its own, under the name of its parent's."""
    places = kind(search)
    places.complete()
    main = ModuleType("__main__")
    vars(main)["held"] = Functions.old
    monkeypatch.setitem(sys.modules, "__main__", main)
    holders.modules.append(main)
    assert places.replace(Functions.old, Functions.new, None) == 4
    assert holders.held() == ["new"] * 4


def test_modules_that_left_hide_no_later_one(kind: type[Places], holders: Holders) -> None:
    places = kind(search)
    places.complete()
    del sys.modules["holder_2"]
    holders.modules[2] = holders.add("a_late_holder")
    places.replace(Functions.old, Functions.new, None)
    assert holders.held() == ["new"] * 3


def test_module_amid_its_import_is_found_by_later_names(
    kind: type[Places], holders: Holders
) -> None:
    growing = holders.modules[1]
    growing.__spec__ = spec = ModuleSpec(growing.__name__, None)
    spec._initializing = True  # type: ignore[attr-defined]
    places = kind(search)
    places.complete()
    vars(growing)["another"] = Functions.old
    assert places.replace(Functions.old, Functions.new, None) == 4
    assert vars(growing)["another"]() == "new"


def test_function_hooked_again_is_found_in_its_places(kind: type[Places], holders: Holders) -> None:
    places = kind(search)
    places.replace(Functions.old, Functions.new, None)
    assert places.replace(Functions.new, Functions.newer, None) == 3
    assert holders.held() == ["newer"] * 3


def test_callable_object_is_left_to_sglangs_search(kind: type[Places], holders: Holders) -> None:
    part = functools.partial(Functions.old)
    vars(holders.modules[1])["held"] = part
    assert kind(search).replace(part, Functions.new, None) == 1
    assert holders.held() == ["old", "new", "old"]


class Keeper(ModuleType):
    """A module that keeps its names."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def test_module_that_keeps_its_names_stops_no_other(
    kind: type[Places], holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Keeper("a_keeper")
    vars(keeper)["held"] = Functions.old
    monkeypatch.setitem(sys.modules, "a_keeper", keeper)
    assert kind(search).replace(Functions.old, Functions.new, None) == 3
    assert holders.held() == ["new"] * 3
    assert vars(keeper)["held"]() == "old"


def test_hooks_are_applied_without_sglangs_search(
    holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's search is back afterwards."""

    def refuse(*_: Any) -> int:
        raise AssertionError("SGLang's search ran")

    monkeypatch.setattr(hook_registry, "_propagate_patch", refuse)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(HookRegistry, "apply_hooks", HookRegistry.__dict__["apply_hooks"])
    hooks.forget()
    HookRegistry.register("holder_0.held", Functions.new, HookType.REPLACE)
    hooks.expect_hook("holder_0.held")
    HookRegistry.apply_hooks()
    hooks.forget()
    assert holders.held() == ["new"] * 3
    assert hook_registry._propagate_patch is refuse


def test_block_within_a_block_has_the_same_index() -> None:
    with looking_once():
        outer = hook_registry._propagate_patch
        with looking_once():
            assert hook_registry._propagate_patch is outer
        assert hook_registry._propagate_patch is outer
    assert hook_registry._propagate_patch is search

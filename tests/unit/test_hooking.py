"""A collaborator's method is the hook itself, as SGLang's registry calls it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

from sglang_inflight.hooking import (
    AFTER,
    AROUND,
    BEFORE,
    REPLACE,
    Hook,
    _as_called,
    one_around_each,
    with_us,
)
from sglang_inflight_tools.parameters import Parameters
from sglang_inflight_tools.source_tree import SourceTree
from sglang_inflight_tools.targets import why_not_hooked


class Collaborator:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def before(self, batch: str) -> None:
        self.seen.append(batch)

    def after(self, result: str, batch: str) -> str:
        return f"{result}, then {batch}"

    def around(self, run: Any, batch: str) -> str:
        return f"<{run(batch)}>"

    def instead(self, batch: str) -> str:
        return f"ours {batch}"


class Scheduler:
    inflight: Any

    def run(self, batch: str) -> str:
        return f"SGLang {batch}"


@pytest.mark.parametrize(
    ("kind", "name", "answer"),
    [
        (BEFORE, "before", "SGLang b"),
        (AFTER, "after", "SGLang b, then b"),
        (AROUND, "around", "<SGLang b>"),
        (REPLACE, "instead", "ours b"),
    ],
)
def test_method_is_called_on_the_object_that_via_leads_to(
    kind: HookType, name: str, answer: str
) -> None:
    ours, scheduler = Collaborator(), Scheduler()
    scheduler.inflight = SimpleNamespace(turns=ours)
    method = getattr(Collaborator, name)
    hook, as_kind = _as_called(method, kind, "inflight.turns", None)
    assert (_wrap_fn(Scheduler.run, hook, as_kind)(scheduler, "b"), as_kind) == (answer, kind)
    assert ours.seen == (["b"] if kind is BEFORE else [])
    # the way may be a function; an object of a server without us is left to SGLang
    hook, as_kind = _as_called(method, kind, lambda each: each.inflight.turns, with_us)
    wrapped = _wrap_fn(Scheduler.run, hook, as_kind)
    assert (wrapped(scheduler, "b"), wrapped(Scheduler(), "b")) == (answer, "SGLang b")


def test_hook_with_another_parameter_than_its_target_does_not_fit(tmp_path: Any) -> None:
    (tmp_path / "theirs.py").write_text("class Scheduler:\n    def run(self, lot): ...\n")
    tree = SourceTree(tmp_path)
    for kind, name in ((BEFORE, "before"), (AFTER, "after"), (AROUND, "around")):
        hook, _ = _as_called(getattr(Collaborator, name), kind, "inflight.turns", None)
        why = why_not_hooked(tree, "theirs.Scheduler.run", Parameters.of_function(hook), kind.name)
        assert why == "its parameter 1 is 'lot', our hook's is 'batch'"


def test_hooks_around_one_target_are_put_into_each_other_by_order() -> None:
    said: list[str] = []

    def around(name: str) -> Callable[..., Any]:
        def hook(original: Callable[..., Any], value: int) -> Any:
            said.append(name)
            return original(value + 1)

        return hook

    before = Hook("a.b", print, HookType.BEFORE)
    inner, middle, outer = (Hook("a.b", around(n), HookType.AROUND) for n in ("in", "mid", "out"))
    other = Hook("a.c", around("other"), HookType.AROUND)
    kept, put_together, alone = one_around_each([inner, before, middle, outer, other])
    assert (kept, alone) == (before, other)
    assert put_together.function(lambda value: value * 10, 0) == 30
    assert said == ["out", "mid", "in"]

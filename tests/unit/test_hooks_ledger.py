"""Each page of the ledger has the hooks that its part of the code declares."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from sglang.srt.plugins.hook_registry import HookType

import sglang_inflight
from sglang_inflight import hooking
from sglang_inflight.hooking import Hook, hooks_of, one_around_each
from sglang_inflight.plugin import every_hook, hook_modules
from tests.support.ledger import LEDGERS, Ledger

PACKAGE = Path(sglang_inflight.__file__).parent


@pytest.mark.parametrize("ledger", LEDGERS.values(), ids=map(str, LEDGERS))
def test_ledgers_hook_table_matches_code(ledger: Ledger) -> None:
    hooks = {
        (".".join(target.split(".")[-2:]), kind.name)
        for target, _, kind in hooks_of(ledger.modules)
    }
    assert {(target, kind) for target, kind, _ in ledger.rows} == hooks


def test_every_hook_is_of_one_ledger() -> None:
    assert sum(len(hooks_of(each.modules)) for each in LEDGERS.values()) == len(every_hook())


def test_no_function_has_two_hooks_around_it() -> None:
    """SGLang warns of a second one at every start."""
    registered = one_around_each(every_hook())
    around = Counter(target for target, _, kind in registered if kind is HookType.AROUND)
    assert [target for target, count in around.items() if count > 1] == []


def test_every_module_that_declares_hooks_is_installed() -> None:
    declaring = {
        ".".join((PACKAGE.name, *file.relative_to(PACKAGE).with_suffix("").parts))
        for file in PACKAGE.rglob("*.py")
        if re.search(r"^ *@hook\(|^hook_each\(", file.read_text(), re.MULTILINE)
    }
    assert declaring <= {*hook_modules()}


def test_order_of_modules_does_not_order_hooks() -> None:
    assert hooks_of(reversed(hook_modules())) == every_hook()


def test_two_hooks_of_one_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = [(0, Hook("a.b", print, HookType.AROUND)), (0, Hook("a.b", repr, HookType.AFTER))]
    monkeypatch.setitem(hooking._declared, hooking.__name__, twice)
    with pytest.raises(ValueError, match=r"two hooks on a\.b have the order 0"):
        hooks_of([hooking.__name__])

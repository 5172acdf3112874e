"""The ledger's table of hooks matches the code."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from sglang.srt.plugins.hook_registry import HookType

from sglang_inflight.plugin import every_hook

LEDGER = Path(__file__).parents[2] / "patches" / "README.md"


def test_ledgers_hook_table_matches_code() -> None:
    table = LEDGER.read_text().partition("## Hooks")[2]
    rows = set(re.findall(r"^\| `([\w.]+)` \| (\w+) \|", table, re.MULTILINE))
    hooks = {(".".join(target.split(".")[-2:]), kind.name) for target, _, kind in every_hook()}
    assert rows == hooks


def test_no_function_has_two_hooks_around_it() -> None:
    """SGLang warns of a second one at every start."""
    around = Counter(target for target, _, kind in every_hook() if kind is HookType.AROUND)
    assert [target for target, count in around.items() if count > 1] == []

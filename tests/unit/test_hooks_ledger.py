"""The ledger's table of hooks is the code's."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_inflight.frontend import tokenizer_hooks
from sglang_inflight.frontend.engine import hooks as engine_hooks
from sglang_inflight.frontend.workers import hooks as worker_hooks
from sglang_inflight.scheduler import hooks as scheduler_hooks

LEDGER = Path(__file__).parents[2] / "patches" / "README.md"


def test_every_hook_has_a_row_and_every_row_a_hook() -> None:
    table = LEDGER.read_text().partition("## Hooks")[2]
    rows = set(re.findall(r"^\| `([\w.]+)` \| (\w+) \|", table, re.MULTILINE))
    hooks = {
        (".".join(target.split(".")[-2:]), kind.name)
        for target, _, kind in (
            *scheduler_hooks.HOOKS,
            *tokenizer_hooks.HOOKS,
            *engine_hooks.HOOKS,
            *worker_hooks.HOOKS,
        )
    }
    assert rows == hooks

"""The plan of our patches for the installed SGLang, kept for forks.

Each process of a server parses the modules to be patched, before and after, to prove that only
bodies of functions change. That is half of a start without imports, and depends on nothing but the
patches and the modules' texts. A fork reads both anew. It finds the plan here if they are equal,
and otherwise makes its own. Nothing writes into a plan.
"""

from __future__ import annotations

import contextlib
import functools

from sglang_inflight.livepatch import series
from sglang_inflight.livepatch.hooks import PatchRefused
from sglang_inflight.livepatch.series import Plan, Series, load_series


def install() -> None:
    kept: dict[tuple[object, ...], Plan] = {}
    make_plan = Series.plan

    def plan(self: Series) -> Plan:
        # the plan has paths below the root
        key = (self, self.root, *(self._read(file, name) for name, file in self._reach()))
        if key not in kept:
            kept[key] = make_plan(self)
        return kept[key]

    Series.plan = plan  # type: ignore[method-assign]
    compiled = series.compiled = functools.cache(series.compiled)  # type: ignore[attr-defined]
    # a server whose SGLang does not fit says so itself
    with contextlib.suppress(PatchRefused, SyntaxError):
        for module in load_series().plan().modules:
            _ = module.lines
            for change, _patches in module.changes:
                compiled(change, module.module.tree, module.filename)

"""The index of hooks' places, kept for forks, which look at their own imports alone.

A look at all modules writes to each: Python counts its references. A fork then copies the page of
each module, thousands of them in each process of a server.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

from sglang_inflight.livepatch.places import Places


class KeptPlaces(Places):
    """An index that takes modules under names of the last look for the same modules.

    ``__main__`` is the exception: a fork has another one.
    """

    _known = 0
    _last: str | None = None

    def complete(self) -> None:
        modules: Any = sys.modules
        new = len(modules) - self._known
        # newest first, and the last of the names before
        names = list(itertools.islice(reversed(modules), max(new, 0) + 1))
        if self._last is None or new < 0 or names[-1] != self._last:
            super().complete()
        elif new:
            self._index([*self._growing, *(modules[name] for name in names[:-1])])
        self._known, self._last = len(modules), names[0]
        main = modules["__main__"]
        if main not in self._growing:
            self._indexed.discard(main)
            self._growing.append(main)

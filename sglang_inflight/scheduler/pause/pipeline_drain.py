"""A pipeline in which nothing is in flight, for what cannot be done while something is.

A message comes to all stages of a pipeline in turns of the same number, ahead of that turn's
microbatch. So where a call waits here, all stages stop launching in the same turn. A turn that
launches nothing passes nothing on to the next stage, and each turn the results of one microbatch
are processed: after as many turns as there are microbatches none is in flight, in every stage in
the same turn again, without a message of its own. The calls are handled there, in the order in
which they came; and those that come meanwhile wait behind them.

Elsewhere a call is handled at once: a step boundary is as still as can be.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import TypeVar

from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.sglang_types.runtime_context import get_parallel

C = TypeVar("C")


class PipelineDrain:
    """The calls that wait for it. Only the scheduler's thread touches it."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()

    @property
    def is_waited_for(self) -> bool:
        return bool(self._waiting)

    def defer(
        self, handle: Callable[[C], None], needed: Callable[[C], bool] = lambda call: True
    ) -> Callable[[C], None]:
        """``handle``, done when nothing is in flight, for the calls that need it. Must not raise.

        Also those that do not need it come behind the ones that wait.
        """
        if get_parallel().pp_size == 1:
            return handle

        def handle_or_wait(call: C) -> None:
            if self._waiting or (needed(call) and self._boundary.pending_batches):
                self._waiting.append(lambda: handle(call))
            else:
                handle(call)

        return handle_or_wait

    def run_if_drained(self) -> bool:
        """Once in each turn, before it launches: handle what waits, if all is still.

        Returns whether it is not, and this turn must launch nothing.
        """
        if not self._waiting:
            return False
        if self._boundary.pending_batches:
            return True
        while self._waiting:
            self._waiting.popleft()()
        return False

"""Drains a pipeline's microbatches before calls that need none in flight.

A message reaches all stages of a pipeline in the turn of the same number, ahead of that turn's
microbatch. So all stages stop launching in the same turn when a call waits here. A turn without
a launch passes nothing to the next stage, and each turn processes the results of one microbatch.
After one turn per microbatch none is in flight. Every stage gets there in the same turn, without
another message. The waiting calls are handled then, in the order of their arrival. Later calls
wait behind them.

Without a pipeline a call is handled at once: a step boundary has no microbatches in flight.

``SkippedTurns`` counts held turns that are still owed. A microbatch's prefilled requests stay in
``last_mbs`` until its next turn moves them into its running batch. SGLang looks for them nowhere
else, because that turn normally follows at once. A held turn breaks this: requests may then be in
``last_mbs`` and in no other list. That lasts until each microbatch has had its turn, even when the
others have had theirs again.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import TypeVar

from sglang_inflight.scheduler.requests import Requests
from sglang_inflight.sglang_types import get_parallel


class SkippedTurns:
    """The number of owed turns. Only the scheduler's thread touches it."""

    def __init__(self) -> None:
        self._owed = 0

    def begin(self, *, held: bool, microbatches: int) -> None:
        """Count a turn. A ``held`` turn launches nothing, and makes every microbatch owed one."""
        self._owed = microbatches if held else max(0, self._owed - 1)

    @property
    def pending(self) -> bool:
        return self._owed > 0


C = TypeVar("C")


class PipelineDrain:
    """Calls waiting for a drained pipeline. Only the scheduler's thread touches it."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()

    @property
    def is_waited_for(self) -> bool:
        return bool(self._waiting)

    def defer(
        self, handle: Callable[[C], None], needed: Callable[[C], bool] = lambda call: True
    ) -> Callable[[C], None]:
        """Return a handler that defers ``needed`` calls until no microbatch is in flight.

        Calls that need no drain still queue behind waiting calls. ``handle`` must not raise.
        """
        if get_parallel().pp_size == 1:
            return handle

        def handle_or_wait(call: C) -> None:
            if self._waiting or (needed(call) and self._requests.pending_batches):
                self._waiting.append(lambda: handle(call))
            else:
                handle(call)

        return handle_or_wait

    def run_if_drained(self) -> bool:
        """Handle the waiting calls if no microbatch is in flight.

        Called once in each turn, before its launch. Return True if the drain goes on: this turn
        must launch nothing.
        """
        if not self._waiting:
            return False
        if self._requests.pending_batches:
            return True
        while self._waiting:
            self._waiting.popleft()()
        return False

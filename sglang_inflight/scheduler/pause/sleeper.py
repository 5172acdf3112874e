"""Sleep of a loop that makes no step, until there is something to do."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import zmq

from sglang_inflight.sglang_types.runtime_context import get_parallel

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.scheduler import Scheduler

# How long a loop sleeps at most: the ranks behind the first one wait in a gloo
# broadcast meanwhile, and its time limit is minutes.
LONGEST_SLEEP_S = 1.0
# Under attention DP several ranks have a socket, and none may keep the others waiting.
LONGEST_SLEEP_IN_STEP_S = 0.005


class Sleeper:
    """Wakes the scheduler's thread, which alone may call it, when a message comes."""

    def __init__(self, scheduler: Scheduler) -> None:
        channels = scheduler.ipc_channels
        # Ranks without a socket sleep in the broadcast of the first one. And where SGLang's
        # scripted runtime stands before the socket, a script is what comes next, not a message:
        # every pass of the loop is one of its steps.
        self._poller: zmq.Poller | None = None
        if isinstance(channels.recv_from_tokenizer, zmq.Socket):
            self._poller = zmq.Poller()
            self._poller.register(channels.recv_from_tokenizer, zmq.POLLIN)
            self._poller.register(channels.recv_from_rpc, zmq.POLLIN)

    def sleep(self, alarm: float | None) -> None:
        """Until a message comes, or ``alarm`` of ``time.monotonic()``, whichever is first."""
        if self._poller is None:
            return
        longest = LONGEST_SLEEP_S
        if get_parallel().attn_dp_enabled:
            longest = LONGEST_SLEEP_IN_STEP_S
        if alarm is not None:
            longest = min(longest, alarm - time.monotonic())
        self._poller.poll(int(1000 * max(0.0, longest)))

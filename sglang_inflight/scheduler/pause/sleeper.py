"""Puts a loop without steps to sleep, until a message or an alarm."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import zmq

from sglang_inflight.sglang_types import get_parallel

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import Scheduler

# Longest sleep of a loop. The other ranks wait in a gloo broadcast meanwhile, and its time
# limit is minutes.
LONGEST_SLEEP_S = 1.0
# Under attention DP several ranks have a socket, and a sleeping rank delays the others.
LONGEST_SLEEP_IN_STEP_S = 0.005


class Sleeper:
    """Sleeps until a message comes. Only the scheduler's thread calls it."""

    def __init__(self, scheduler: Scheduler) -> None:
        channels = scheduler.ipc_channels
        # Ranks without a socket sleep in the first rank's broadcast instead. SGLang's scripted
        # runtime replaces the socket by a script with a step in every pass: never sleep there.
        self._poller: zmq.Poller | None = None
        if isinstance(channels.recv_from_tokenizer, zmq.Socket):
            self._poller = zmq.Poller()
            self._poller.register(channels.recv_from_tokenizer, zmq.POLLIN)
            self._poller.register(channels.recv_from_rpc, zmq.POLLIN)

    def sleep(self, alarm: float | None) -> None:
        """Sleep until a message comes, or until ``alarm`` of ``time.monotonic()``."""
        if self._poller is None:
            return
        longest = LONGEST_SLEEP_S
        if get_parallel().attn_dp_enabled:
            longest = LONGEST_SLEEP_IN_STEP_S
        if alarm is not None:
            longest = min(longest, alarm - time.monotonic())
        self._poller.poll(int(1000 * max(0.0, longest)))

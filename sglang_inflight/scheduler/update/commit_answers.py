"""Answers a commit when its swap is done, with the time for which the swap held steps."""

from __future__ import annotations

import logging

from sglang_inflight.messages import Committed, InflightCall
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.metrics import Metrics
from sglang_inflight.scheduler.update.live_weights import DeviceSwap, LiveWeights

logger = logging.getLogger(__name__)


class CommitAnswers:
    """Answers commits and rollbacks. Only the scheduler's thread touches this object.

    On a device the loop only enqueues a swap, in less than a millisecond. The forwards behind the
    swap wait for the copies, and the host learns later for how long. So such a commit is answered
    at the first boundary after the swap's end. If no step is made, the loop is about to sleep, and
    nothing else would wake it: then the loop waits for the swap.
    """

    def __init__(self, answers: AnswerChannel, live: LiveWeights, metrics: Metrics) -> None:
        self._answers = answers
        self._live = live
        self._metrics = metrics
        self._waiting: list[tuple[InflightCall[Committed], Committed, DeviceSwap | None]] = []

    def give(self, call: InflightCall[Committed], committed: Committed) -> None:
        """Answer ``call``, at once or at a later boundary.

        ``committed.stall_ms`` holds the time on the loop, the whole time on a CPU.
        """
        self._waiting.append((call, committed, self._live.last_swap))
        self.give_due()

    def give_due(self, *, wait: bool = False) -> None:
        """Answer finished commits, at each boundary. ``wait``: no step is made now."""
        while self._waiting:
            call, committed, swap = self._waiting[0]
            if swap is not None:
                if wait:
                    swap.wait()
                elif not swap.is_done():
                    return
                committed.stall_ms = max(committed.stall_ms, swap.milliseconds())
            del self._waiting[0]
            self._metrics.commit_stall.observe(committed.stall_ms / 1000)
            logger.info(
                "The commit of epoch %d held steps for %.2f ms.",
                committed.epoch,
                committed.stall_ms,
            )
            self._answers.succeed(call, committed)

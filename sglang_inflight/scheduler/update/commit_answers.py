"""A commit is answered when its swap is done, and says how long that held steps up."""

from __future__ import annotations

import logging

from sglang_inflight.messages import Committed, InflightCall
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.metrics import Metrics
from sglang_inflight.scheduler.update.live_weights import DeviceSwap, LiveWeights

logger = logging.getLogger(__name__)


class CommitAnswers:
    """Answers commits and rollbacks. Only the scheduler's thread touches it.

    On a device the loop only enqueues a swap, in less than a millisecond, and the forwards behind
    it wait for as long as the copies take, which the host learns later. So such a commit is
    answered at the first boundary that finds its swap done. Where no step is made the loop is
    about to sleep, and waits for the swap instead: nothing else would wake it.
    """

    def __init__(self, answers: AnswerChannel, live: LiveWeights, metrics: Metrics) -> None:
        self._answers = answers
        self._live = live
        self._metrics = metrics
        self._waiting: list[tuple[InflightCall[Committed], Committed, DeviceSwap | None]] = []

    def give(self, call: InflightCall[Committed], committed: Committed) -> None:
        """``committed`` says how long the loop was held, which is all where there is no device."""
        self._waiting.append((call, committed, self._live.last_swap))
        self.give_due()

    def give_due(self, *, wait: bool = False) -> None:
        """Called at each boundary. ``wait``: no step is made, and the loop may sleep."""
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

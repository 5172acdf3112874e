"""Asks whether a trainer is still there, while its broadcast is awaited."""

from __future__ import annotations

import queue
import time

from torch._C._distributed_c10d import Store

from sglang_inflight.threads import start_thread

# time for one answer of a trainer, in ``answers``
ANSWERS_S = 2.0
# pause between questions, and the longest silence while a broadcast is awaited: a trainer stopped
# for a moment, or far away, loses nothing
ASK_EVERY_S = 2.0
SILENT_S = 20.0
# time for a broadcast after the store's end: a process other than the trainer may have kept it
GRACE_S = 10.0


class Pulse:
    """Asks the store of one trainer's group; the store ends with the trainer.

    A thread of its own asks each question, and is abandoned without an answer: the store's socket
    has no timeout, and a stopped process does not answer. There is one question at a time. Only
    one thread uses this object.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._answer: queue.SimpleQueue[bool] | None = None
        # time of the open question, and of the next one
        self._asked = 0.0
        self._ask_at = time.monotonic() + ASK_EVERY_S
        # when the store was first seen to have ended
        self._ended: float | None = None

    @property
    def was_missed(self) -> bool:
        """True if the store has ended. A broadcast after that proves the store useless as a sign
        of its trainer's life.
        """
        return self._ended is not None

    def answers(self) -> bool:
        """Return whether an answer comes within ``ANSWERS_S``."""
        try:
            return self._ask().get(timeout=ANSWERS_S)
        except queue.Empty:
            return False

    def why_gone(self) -> str | None:
        """Return why no broadcast will come, or None. Waits for nothing; call it often."""
        now = time.monotonic()
        if self._ended is not None:
            return "its trainer has ended" if now - self._ended > GRACE_S else None
        if self._answer is None:
            if now >= self._ask_at:
                self._answer, self._asked = self._ask(), now
            return None
        try:
            is_there = self._answer.get_nowait()
        except queue.Empty:
            silent = now - self._asked
            return f"its trainer was silent for {silent:.0f} s" if silent > SILENT_S else None
        self._answer, self._ask_at = None, now + ASK_EVERY_S
        self._ended = None if is_there else now
        return None

    def _ask(self) -> queue.SimpleQueue[bool]:
        answer: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def ask() -> None:
            try:
                self._store.check(["inflight"])
            except RuntimeError:
                answer.put(False)
            else:
                answer.put(True)

        start_thread(ask, name="inflight-ask-trainer")
        return answer

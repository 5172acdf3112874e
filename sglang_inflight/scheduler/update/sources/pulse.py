"""Whether a trainer is still there, asked while its broadcast is waited for."""

from __future__ import annotations

import queue
import time

from torch._C._distributed_c10d import Store

from sglang_inflight.threads import start_thread

# for a trainer to say that it is still there
ANSWERS_S = 2.0
# how often a trainer is asked, and how long it may be silent while its broadcast is awaited: one
# that is stopped for a moment, or far away, loses nothing
ASK_EVERY_S = 2.0
SILENT_S = 20.0
# how long a broadcast may still come when the store has ended: another process may have kept it
GRACE_S = 10.0


class Pulse:
    """Asks one trainer's store, which was made for a group and ends with the trainer.

    A question is put on a thread that is left behind where no answer comes: the store's socket
    can be given no time limit, and a process that was stopped does not answer either. There is
    one question at a time. Whoever made this object is the only one to use it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._answer: queue.SimpleQueue[bool] | None = None
        # of the question that is open, or of the next one
        self._asked = 0.0
        self._ask_at = time.monotonic() + ASK_EVERY_S
        # since when the store has ended, as far as is known
        self._ended: float | None = None

    @property
    def was_missed(self) -> bool:
        """Whether the store had ended. If the broadcast comes all the same, the store says nothing
        of its trainer.
        """
        return self._ended is not None

    def answers(self) -> bool:
        """Wait for an answer, ``ANSWERS_S`` at most."""
        try:
            return self._ask().get(timeout=ANSWERS_S)
        except queue.Empty:
            return False

    def why_gone(self) -> str | None:
        """Why nothing more will come, or None. Waits for nothing; to be asked often."""
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

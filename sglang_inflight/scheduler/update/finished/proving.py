"""A search for a model's recipe, on a thread of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.vocabulary.errors import Dropped

T = TypeVar("T")


class Proving(Generic[T]):
    """A search that outlives the update that began it, so that it need not begin anew.

    It may take longer than an update's time limit: each rank reads and finishes a whole checkpoint.
    The update's job waits for it, and gives up by its own limit. The next update waits for the same
    search.

    The search reads the served weights, which nothing writes meanwhile: only a recipe allows a
    staged update. Whatever writes them without one, or releases their memory, calls ``stop``
    before. The staging thread makes and ends this object. On a device the search works on that
    thread's stream, so its reads come before what that thread enqueues after ``stop``.
    """

    def __init__(self, find: Callable[[Callable[[], None]], T], device: torch.device) -> None:
        """``find`` calls its argument now and then, which raises once the search is stopped."""
        self._check: Callable[[], None] = _do_nothing
        self._is_stopped = False
        with AbandonableThread(lambda: self._check(), device) as thread:
            thread.begin(lambda: find(self._require_wanted))
        self._thread = thread

    def result(self, check: Callable[[], None]) -> T:
        """Wait for the result. Raise what the search raises, or ``check``: then call again."""
        self._check = check
        result: T = self._thread.end()
        return result

    def give_up(self) -> None:
        """Let the search find nothing: what it compares with is served no more. Any thread."""
        self._is_stopped = True

    def stop(self) -> None:
        """Return when the search reads nothing any more."""
        self._is_stopped = True
        # whatever it has found, it is not asked for any more
        with contextlib.suppress(Exception):
            self.result(_do_nothing)

    def _require_wanted(self) -> None:
        if self._is_stopped:
            raise Dropped("the proof was stopped, because its weights are written or released")


def _do_nothing() -> None:
    pass

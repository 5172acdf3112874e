"""The versions of the ranks, as this process knows them, and waits for a change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from sglang_inflight.frontend.aio import Deadline
from sglang_inflight.frontend.ranks import rank_of
from sglang_inflight.messages import Committed, Described, RankAnswer
from sglang_inflight.topology import Rank
from sglang_inflight.vocabulary.errors import Gone
from sglang_inflight.vocabulary.labels import VersionLabel


class RankVersions:
    """The version label of every rank. Lives on the front end's event loop.

    A commit reaches the replicas at moments of their own. A request may go to any of them, so a
    demand holds when it holds for every rank's label. A rank's answers arrive in the order of
    sending, so its last label is the true one.

    A waiter looks again after each change, and changes happen on the same event loop as the look.
    So no change is missed between a look and its sleep.
    """

    def __init__(self, ranks: Iterable[Rank], version: str) -> None:
        self._of_ranks = dict.fromkeys(sorted(ranks), VersionLabel(0, version))
        # the ranks' different labels, the first rank's first
        self.labels: tuple[VersionLabel, ...] = (VersionLabel(0, version),)
        self._sleeping: set[asyncio.Future[None]] = set()
        self._why_over: str | None = None

    @property
    def first(self) -> VersionLabel:
        """The first rank's label, which stands for the server, as in the status."""
        return self.labels[0]

    def take_answer(self, answer: RankAnswer) -> None:
        match answer:
            case Committed(weight_version=version, epoch=epoch):
                label = VersionLabel(epoch, version)
            case Described(weights=weights):
                label = VersionLabel(weights.epoch, weights.weight_version)
            case _:
                return
        self._of_ranks[rank_of(answer)] = label
        self.replace(dict.fromkeys(self._of_ranks.values()))

    def replace(self, labels: Iterable[VersionLabel]) -> None:
        """Take the ranks' different ``labels``: a worker has them from the owner."""
        if self.labels != (labels := tuple(labels)):
            self.labels = labels
            self.notify()

    def notify(self) -> None:
        """Let every waiter look again."""
        for sleep in self._sleeping:
            if not sleep.done():
                sleep.set_result(None)

    def end(self, why: str) -> None:
        """End all waits, present and future, with ``Gone``."""
        self._why_over = why
        self.notify()

    async def until(self, why_not: Callable[[], str | None], seconds: float) -> str | None:
        """Wait until ``why_not`` returns None, at most ``seconds``. Return its last answer.

        Raises ``Gone`` after ``end``.
        """
        deadline = Deadline(seconds)
        while (why := why_not()) is not None:
            if self._why_over is not None:
                raise Gone(f"{self._why_over}: {why}")
            if deadline.is_over:
                return why
            await self._sleep(deadline.seconds_left)
        return None

    async def _sleep(self, seconds: float) -> None:
        sleep = asyncio.get_running_loop().create_future()
        self._sleeping.add(sleep)
        try:
            await asyncio.wait({sleep}, timeout=seconds)
        finally:
            self._sleeping.discard(sleep)

"""Sends the buckets of one version, while the servers receive them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import TYPE_CHECKING, Any

from sglang_inflight.client.report import FleetRefused, Report
from sglang_inflight.client.sender import REASON_S, GroupFailed
from sglang_inflight.client.trainer_group import POLL_S, TrainerGroup
from sglang_inflight.mooncake import Mooncake

if TYPE_CHECKING:
    import torch

# time for other servers to report their failures, once one has failed: a dead one is named, too
OTHERS_S = 1.0


class Calls:
    """A version's call to each server. Rank 0's thread owns it.

    A failure of one server ends the version, though others may wait for that server in a chain.
    """

    def __init__(self, calls: Mapping[str, Future[Any]], *, is_fleet: bool) -> None:
        """``calls``: by the server's URL."""
        self._calls = calls
        self._is_fleet = is_fleet

    def check(self) -> None:
        """Raise if a server has failed: its error, or ``FleetRefused`` for a fleet."""
        if any(call.done() and call.exception() is not None for call in self._calls.values()):
            self._raise()

    def finish(self) -> None:
        """Wait for all servers. Raises as ``check``."""
        wait(self._calls.values(), return_when=FIRST_EXCEPTION)
        self.check()

    @property
    def unpatched(self) -> set[str]:
        """Names of tensors that have to come whole in this session, once all calls are done."""
        return {name for call in self._calls.values() for name in call.result().unpatched}

    def find_reason(self) -> None:
        """Raise a failure that comes soon."""
        wait(self._calls.values(), REASON_S, FIRST_COMPLETED)
        self.check()

    def cancel(self) -> None:
        for call in self._calls.values():
            call.cancel()

    def _raise(self) -> None:
        wait(self._calls.values(), OTHERS_S)
        report = Report[Any]("stage")
        for url, call in self._calls.items():
            if not call.done():
                report.failures[url] = GroupFailed("it still waited for parts")
            elif (error := call.exception()) is None:
                report.answers[url] = call.result()
            elif self._is_fleet and isinstance(error, Exception):
                report.failures[url] = error
            else:
                raise error
        raise FleetRefused(report)


class Sending:
    """The sends of one version from one rank. One is under way to each receiver."""

    def __init__(
        self,
        sends: Mapping[int, Iterator[torch.Tensor]],
        group: TrainerGroup | None,
        engine: Callable[[], Mooncake] | None,
    ) -> None:
        """``sends``: the bytes of the buckets for each receiver, by its rank in the group.

        ``engine``: as in ``TrainerGroup.send``.
        """
        assert group is not None
        self._sends = {**sends}
        self._group = group
        self._engine = engine
        # the send to each receiver, with its memory
        self._under_way: dict[int, tuple[Future[None], torch.Tensor]] = {}

    def run(self, check: Callable[[], object]) -> None:
        """Send everything. ``check`` raises to give up; so does a failure of another rank."""
        while self._sends or self._under_way:
            self._begin()
            done = [rank for rank, (sent, _) in self._under_way.items() if sent.done()]
            for rank in done:
                sent, _ = self._under_way.pop(rank)
                try:
                    sent.result()
                except RuntimeError as error:
                    raise GroupFailed(f"sending to rank {rank} of the group: {error}") from error
            if not done:
                check()
                if (why := self._group.why_failed()) is not None:
                    raise GroupFailed(why)
                wait([sent for sent, _ in self._under_way.values()], POLL_S, FIRST_COMPLETED)

    def _begin(self) -> None:
        for rank in [*self._sends]:
            if rank in self._under_way:
                continue
            if (row := next(self._sends[rank], None)) is None:
                del self._sends[rank]
                continue
            self._under_way[rank] = self._group.send(row, rank, self._engine), row

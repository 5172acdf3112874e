"""Outcome of a call on each server of a fleet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from sglang_inflight.vocabulary.answers import Answer
from sglang_inflight.vocabulary.errors import Conflict, HalfDone, Refused

Phase = Literal[
    "status", "wait", "pause", "resume", "begin", "stage", "seal", "commit", "roll back", "catch up"
]


A = TypeVar("A", bound=Answer)


@dataclass
class Report(Generic[A]):
    """Outcome of one phase. Each server's URL is in either ``answers`` or ``failures``."""

    phase: Phase
    answers: dict[str, A] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)

    @property
    def uncertain(self) -> list[str]:
        """Failed servers that may have changed all the same: their error is no refusal."""
        return [url for url, error in self.failures.items() if not isinstance(error, Refused)]

    def __str__(self) -> str:
        failed = (
            f"{url} {'may have failed' if url in self.uncertain else 'failed'} "
            f"({str(error) or type(error).__name__})"
            for url, error in self.failures.items()
        )
        done = f"done on {_list(self.answers)}" if self.answers else "done on no server"
        return f"{self.phase}: {'; '.join([*failed, done])}"


class FleetRefused(Refused):
    """A server failed, and no server has changed. Mend the cause and call again.

    A server in ``report.uncertain`` may hold a pause or a session until its lease expires.
    """

    def __init__(self, report: Report[Any]) -> None:
        super().__init__(f"nothing has changed on any server; {report}")
        self.report = report


class FleetSplit(HalfDone):
    """Some servers have changed and others failed: they serve different weights.

    ``report.answers`` has the changed servers; roll them back if necessary. ``report.failures``
    has the failed ones. A server in ``report.uncertain`` may have changed: ask its ``status``, or
    replace it if it is dead.
    """

    def __init__(self, report: Report[Any]) -> None:
        certain = report.answers and len(report.uncertain) < len(report.failures)
        super().__init__(f"the fleet {'is' if certain else 'may be'} split; {report}")
        self.report = report


class PauseLost(Conflict):
    """A server's pause was lost before the end of the block.

    Servers in ``report.failures`` may have generated meanwhile. All our pauses are released, or
    end with their leases.
    """

    def __init__(self, report: Report[Any]) -> None:
        super().__init__(f"not every server was paused until the end; {report}")
        self.report = report


def _list(urls: Iterable[str]) -> str:
    return ", ".join(urls)

"""What became of a call on each server of a fleet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from sglang_inflight.answer import Answer
from sglang_inflight.errors import Conflict, HalfDone, Refused

Phase = Literal["status", "pause", "resume", "begin", "stage", "seal", "commit", "roll back"]


A = TypeVar("A", bound=Answer)


@dataclass
class Report(Generic[A]):
    """Of one phase, on each server by its URL, which is in exactly one of the two."""

    phase: Phase
    answers: dict[str, A] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)

    @property
    def uncertain(self) -> list[str]:
        """Failed, but may have done it all the same, or a part of it: no refusal was heard."""
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
    """Not every server could do its part. No server has changed: mend it and call again.

    What one that is ``report.uncertain`` holds, a pause or a session, ends with its lease.
    """

    def __init__(self, report: Report[Any]) -> None:
        super().__init__(f"nothing has changed on any server; {report}")
        self.report = report


class FleetSplit(HalfDone):
    """Some servers have changed and others failed: they serve different weights.

    ``report.answers`` has those that changed, which may be rolled back; ``report.failures``
    those that did not. One that is ``report.uncertain`` may have: its ``status`` tells, if
    it is alive, and it is to be replaced otherwise.
    """

    def __init__(self, report: Report[Any]) -> None:
        certain = report.answers and len(report.uncertain) < len(report.failures)
        super().__init__(f"the fleet {'is' if certain else 'may be'} split; {report}")
        self.report = report


class PauseLost(Conflict):
    """Not every server says that it was paused until the end of the block.

    Those of ``report.failures`` may have generated meanwhile. None is paused by us any more,
    or for longer than its lease.
    """

    def __init__(self, report: Report[Any]) -> None:
        super().__init__(f"not every server was paused until the end; {report}")
        self.report = report


def _list(urls: Iterable[str]) -> str:
    return ", ".join(urls)

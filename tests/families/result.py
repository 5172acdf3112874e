"""The result of a row."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from harness.starting import ROOT
from sglang_inflight.vocabulary.answers import Ways

STAGED, IN_PLACE, REFUSED, NOT_BUILT, WRONG = "staged", "in place", "refused", "not built", "WRONG"


# a fork and a fresh process say it in different words
_USES_CUDA = re.compile("Found no NVIDIA driver|Cannot re-initialize CUDA")
_ALONE = "tensors alone"


@dataclass(frozen=True)
class Counts:
    """How many tensors of a checkpoint take each way (``Ways``), and why not all are planned."""

    planned: int
    finished: int
    by_loader: int
    why: str = ""

    @classmethod
    def of(cls, ways: Ways) -> Counts:
        planned, finished, by_loader = (
            each["tensors"] for each in (ways.planned, ways.finished, ways.by_loader)
        )
        return cls(planned, finished, by_loader, one_line(next(iter(ways.why), "")))


@dataclass(frozen=True)
class Result:
    """The effect of updates on a class: one of the words above, and the reason for it."""

    kind: str
    why: str = ""
    # None where updates are not staged
    counts: Counts | None = None

    @property
    def has_logits(self) -> bool:
        return self.kind != NOT_BUILT and _ALONE not in self.why

    def alone(self, reason: str) -> Result:
        """Return this result for tensors without logits, with the reason for that."""
        said = f"{_ALONE}, because {reason}"
        return replace(self, why=f"{self.why}; {said}" if self.why else said)


def named_error(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")


def one_line(said: str) -> str:
    """Return an error's beginning as a cell of a table, without this machine's paths."""
    if _USES_CUDA.search(said):
        return "it uses CUDA"
    said = re.sub(rf"{re.escape(str(ROOT))}\S*?/site-packages/", "", said)
    said = re.sub(r"`?/\S*/v\d+\S*", "the folder", said)
    return " ".join(said.split()).replace("|", "/")[:200]

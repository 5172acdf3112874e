"""The result of a row."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.starting import ROOT

STAGED, IN_PLACE, REFUSED, NOT_BUILT, WRONG = "staged", "in place", "refused", "not built", "WRONG"


# a fork and a fresh process say it in different words
_USES_CUDA = re.compile("Found no NVIDIA driver|Cannot re-initialize CUDA")
_ALONE = "tensors alone"


@dataclass(frozen=True)
class Result:
    """The effect of updates on a class: one of the words above, and the reason for it."""

    kind: str
    why: str = ""

    @property
    def has_logits(self) -> bool:
        return self.kind != NOT_BUILT and _ALONE not in self.why

    def alone(self, reason: str) -> Result:
        """Return this result for tensors without logits, with the reason for that."""
        said = f"{_ALONE}, because {reason}"
        return Result(self.kind, f"{self.why}; {said}" if self.why else said)


def named_error(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")


def one_line(said: str) -> str:
    """Return an error's beginning as a cell of a table, without this machine's paths."""
    if _USES_CUDA.search(said):
        return "it uses CUDA"
    said = re.sub(rf"{re.escape(str(ROOT))}\S*?/site-packages/", "", said)
    said = re.sub(r"`?/\S*/v\d+\S*", "the folder", said)
    return " ".join(said.split()).replace("|", "/")[:200]

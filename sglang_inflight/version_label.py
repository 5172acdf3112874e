"""A version's name and epoch in one text, because the name is what SGLang hands from process
to process with each token.

The name alone does not tell weights apart: trainers need not name a commit, may use a name
twice, and a rollback returns to one. The epoch counts commits and rollbacks.
"""

from __future__ import annotations

from typing import NamedTuple


class VersionLabel(NamedTuple):
    epoch: int
    version: str

    def pack(self) -> str:
        return f"{self.epoch} {self.version}"

    @classmethod
    def unpack(cls, packed: str) -> VersionLabel:
        epoch, _, version = packed.partition(" ")
        return cls(int(epoch), version)

    def span(self, start: int, end: int) -> dict[str, str | int]:
        """As answers have it."""
        return {"version": self.version, "epoch": self.epoch, "start": start, "end": end}

"""A version's name and epoch in one text, because the name is what SGLang hands from process
to process with each token.

The name alone does not tell weights apart: trainers need not name a commit, may use a name
twice, and a rollback returns to one. The epoch counts commits and rollbacks. Of a request with
an adapter the text has the adapter's name and version, too.

Each server counts its own epochs. Of what another server made the text says so: in a pair of a
prefill server and a decode server, the one's first tokens and KV are in the other's answers.
"""

from __future__ import annotations

from typing import NamedTuple


class VersionLabel(NamedTuple):
    epoch: int
    version: str
    # whose epoch and version it is, where it is not the answering server's own
    server: str = ""

    def pack(self) -> str:
        whose = f"@{self.server}" if self.server else ""
        return f"{self.epoch}{whose} {self.version}"

    @classmethod
    def unpack(cls, packed: str) -> VersionLabel:
        count, _, version = packed.partition(" ")
        epoch, _, server = count.partition("@")
        return cls(int(epoch), version, server)

    def span(self, start: int, end: int) -> dict[str, str | int]:
        """As answers have it."""
        return {"version": self.version, "start": start, "end": end, **self.beside_the_name()}

    def beside_the_name(self) -> dict[str, str | int]:
        """What a span says besides what SGLang's own says."""
        whose = {"server": self.server} if self.server else {}
        return {"epoch": self.epoch, **whose}


# in no version's name, because these are printable
_BEFORE_ADAPTER = "\0"


class AdapterLabel(NamedTuple):
    adapter: str
    version: str

    def pack(self) -> str:
        return f"{self.version}{_BEFORE_ADAPTER}{self.adapter}"

    @classmethod
    def unpack(cls, packed: str) -> AdapterLabel:
        version, _, adapter = packed.partition(_BEFORE_ADAPTER)
        return cls(adapter, version)

    def span(self, start: int, end: int) -> dict[str, str | int]:
        """As answers have it."""
        return {"adapter": self.adapter, "version": self.version, "start": start, "end": end}


def add_adapter(version: str, adapter: str) -> str:
    """Both packed labels in one text."""
    return f"{version}{_BEFORE_ADAPTER}{adapter}"


def split_adapter(text: str) -> tuple[str, AdapterLabel | None]:
    """The version's packed label, and the adapter's where there is one."""
    version, separator, adapter = text.partition(_BEFORE_ADAPTER)
    return version, AdapterLabel.unpack(adapter) if separator else None

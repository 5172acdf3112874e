"""A version's name and epoch packed into the text that SGLang carries with each token.

SGLang passes only a version's name between processes. The name alone does not tell weights apart:
trainers need not name a commit, may use a name twice, and a rollback returns to one. The epoch
counts commits and rollbacks. For a request with an adapter the text also holds the adapter's name
and version.

Each server counts its own epochs. A decode server's answers also cover the prefill server's first
token and KV, with a text naming the prefill server.
"""

from __future__ import annotations

from typing import NamedTuple


class VersionLabel(NamedTuple):
    epoch: int
    version: str
    # owner of the epoch and version; "" is the answering server
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
        """Return the span as it appears in answers."""
        return {"version": self.version, "start": start, "end": end, **self.beside_the_name()}

    def beside_the_name(self) -> dict[str, str | int]:
        """Return our fields of a span, without SGLang's own."""
        whose = {"server": self.server} if self.server else {}
        return {"epoch": self.epoch, **whose}


# separator: names of versions are printable, so none contains it
_BEFORE_ADAPTER = "\0"


# version of the adapters loaded at the server's start
FIRST_ADAPTER_VERSION = "0"


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
        """Return the span as it appears in answers."""
        return {"adapter": self.adapter, "version": self.version, "start": start, "end": end}


def add_adapter(version: str, adapter: str) -> str:
    """Join both packed labels into one text."""
    return f"{version}{_BEFORE_ADAPTER}{adapter}"


def split_adapter(text: str) -> tuple[str, AdapterLabel | None]:
    """Return the version's packed label, and the adapter's label if there is one."""
    version, separator, adapter = text.partition(_BEFORE_ADAPTER)
    return version, AdapterLabel.unpack(adapter) if separator else None

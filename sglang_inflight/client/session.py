"""A trainer's session: several updates with one commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_inflight.vocabulary.answers import Begun, Receipt


class Session(Mapping[str, Any]):
    """A session of ``Client``. After its block, ``receipt`` is set and its fields are keys here."""

    def __init__(self, begun: Begun) -> None:
        self._begun = begun
        self.receipt: Receipt | None = None

    @property
    def session_id(self) -> str:
        """Id of the session, for calls sent by other means than this client."""
        return self._begun.session_id

    def as_json(self) -> dict[str, Any]:
        receipt = self.receipt.as_json() if self.receipt is not None else {}
        return self._begun.as_json() | receipt

    def __getitem__(self, name: str) -> Any:
        return self._content()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content())

    def __len__(self) -> int:
        return len(self._content())

    def _content(self) -> dict[str, Any]:
        return {**self._begun} if self.receipt is None else {**self._begun, **self.receipt}

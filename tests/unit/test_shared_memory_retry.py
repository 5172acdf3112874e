"""Payloads whose shared memory torch opens too late."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from sglang_inflight.scheduler.update.sources import tensors
from sglang_inflight.vocabulary.errors import Refused

LATE = RuntimeError("Shared memory manager connection has timed out\nException raised from recv")


class Torch:
    """Raise ``errors`` one after the other, then read the payload."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)

    def unpickle(self, payload: bytes, rest: Callable[[], None]) -> object:
        if self._errors:
            raise self._errors.pop(0)
        return pickle.loads(payload)


def test_shared_memory_timeout_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "unpickle", Torch(LATE, LATE).unpickle)
    assert tensors._unpickle(pickle.dumps([1])) == [1]


@pytest.mark.parametrize("errors", [[LATE] * tensors.TRIES, [ValueError("rubbish")]])
def test_unreadable_shared_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception]
) -> None:
    monkeypatch.setattr(tensors, "unpickle", Torch(*errors).unpickle)
    with pytest.raises(Refused, match="cannot be unpickled"):
        tensors._unpickle(pickle.dumps([1]))

"""The needs of SGLang's handlers are checked before they begin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import SlowDownReqInput

from sglang_inflight.scheduler import isolation
from sglang_inflight.vocabulary.errors import Refused

NOT_NEEDED: Any = None


def check(seconds: float | None) -> None:
    request = SlowDownReqInput(forward_sleep_time=seconds)
    isolation.check(request, NOT_NEEDED, NOT_NEEDED, NOT_NEEDED, NOT_NEEDED)


def test_slow_down_is_bounded_by_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(watchdog_timeout=300.0)
    monkeypatch.setattr(isolation, "get_device", lambda: device)
    for seconds in (None, -1.0, 20.0, 150.0):
        check(seconds)
    for seconds in (151.0, 1e300, float("nan")):
        with pytest.raises(Refused, match="150 s at most"):
            check(seconds)

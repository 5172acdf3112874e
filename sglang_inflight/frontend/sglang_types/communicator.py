"""How SGLang's own control calls reach the schedulers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from sglang_inflight.sglang_types.describes import describes


@describes("sglang.srt.managers.communicator.FanOutCommunicator")
class FanOutCommunicator(Protocol):
    """One for each kind of call. ``_fan_out`` is how many replicas answer."""

    _fan_out: int
    _queueing_lock: asyncio.Lock
    _send: Callable[[Any], None]

"""SGLang's way of sending control calls to the schedulers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from sglang_inflight.sglang_types.describes import describes


@describes("sglang.srt.managers.communicator.FanOutCommunicator")
class FanOutCommunicator(Protocol):
    """Sender of one kind of call. ``_fan_out`` is the number of answering replicas."""

    _fan_out: int
    _queueing_lock: asyncio.Lock
    _send: Callable[[Any], None]

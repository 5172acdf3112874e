"""Client of many servers: all servers change, or none does."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_inflight.client.async_client import TIMEOUT_S
from sglang_inflight.client.async_fleet import AsyncFleet
from sglang_inflight.client.blocking import Blocking, waiting, waiting_block


class Fleet(Blocking[AsyncFleet]):
    """``AsyncFleet`` without an event loop. Callbacks run in another thread."""

    def __init__(
        self, urls: Iterable[str], *, api_key: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Create a fleet. Raises ``ValueError`` for no URL, or for the same URL twice.

        ``timeout_s`` is the time limit of an answer (see ``AsyncClient``).
        """
        super().__init__(AsyncFleet(urls, api_key=api_key, timeout_s=timeout_s))

    status = waiting(AsyncFleet.status)
    paused = waiting_block(AsyncFleet.paused)
    update = waiting(AsyncFleet.update)
    update_from_disk = waiting(AsyncFleet.update_from_disk)
    session = waiting_block(AsyncFleet.session)
    roll_back = waiting(AsyncFleet.roll_back)

"""Client of one server."""

from __future__ import annotations

from sglang_inflight.client.async_client import TIMEOUT_S, AsyncClient
from sglang_inflight.client.blocking import Blocking, waiting, waiting_block


class Client(Blocking[AsyncClient]):
    """``AsyncClient`` without an event loop. Callbacks run in another thread."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Create a client. ``api_key`` is the server's ``--admin-api-key``, or its ``--api-key``.

        ``timeout_s`` is the time limit of an answer (see ``AsyncClient``).
        """
        super().__init__(AsyncClient(url, api_key=api_key, timeout_s=timeout_s))

    status = waiting(AsyncClient.status)
    loads = waiting(AsyncClient.loads)
    pause = waiting(AsyncClient.pause)
    resume = waiting(AsyncClient.resume)
    paused = waiting_block(AsyncClient.paused)
    update = waiting(AsyncClient.update)
    update_from_disk = waiting(AsyncClient.update_from_disk)
    session = waiting_block(AsyncClient.session)
    release_memory = waiting(AsyncClient.release_memory)
    resume_memory = waiting(AsyncClient.resume_memory)
    roll_back = waiting(AsyncClient.roll_back)

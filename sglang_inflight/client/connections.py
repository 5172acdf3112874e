"""A client's TCP connections: TCP notices a dead server, and httpx a connection that ends at once.

httpx can set options on a socket by itself (``socket_options``). A server that dies just after it
took a connection leaves no socket to set them on (uvloop), and httpx then raises an
``AttributeError`` in place of a ``ConnectError``.
"""

from __future__ import annotations

import socket
from typing import Any

import httpcore
import httpx

# milliseconds until TCP notices a dead machine
GIVE_UP_MS = 30_000
_NOTICE_DEATH = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GIVE_UP_MS),
)
_CONNECTED = "connection.connect_tcp.complete"


class Transport(httpx.AsyncHTTPTransport):
    """httpx's transport. A connection that ends before its first byte counts as not made."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions = {**request.extensions, "trace": _notice_death}
        return await super().handle_async_request(request)


async def _notice_death(event: str, info: dict[str, Any]) -> None:
    """Set the options of a new connection. Called by httpcore, which tries again after an error."""
    if event != _CONNECTED:
        return
    said = "the server closed the connection at once"
    try:
        made = info["return_value"].get_extra_info("socket")
        for option in _NOTICE_DEATH:
            made.setsockopt(*option)
    except AttributeError as error:
        # uvloop has dropped the socket, which anyio asks for its peer's name
        raise httpcore.ConnectError(said) from error
    except (OSError, ValueError) as error:
        raise httpcore.ConnectError(f"{said}: {error}") from error

"""Routes whose waiting calls fail when the ranks shut down."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from sglang_inflight.frontend.lifetime import Lifetime


def fails_on_shutdown(lifetime: Lifetime) -> type[APIRoute]:
    """Return a route class; calls still waiting at the end of ``lifetime`` get its error."""

    class AttendedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer = super().get_route_handler()

            async def attend(request: Request) -> Response:
                return await lifetime.unless_shut_down(answer(request))

            return attend

    return AttendedRoute

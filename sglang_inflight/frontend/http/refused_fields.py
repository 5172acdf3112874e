"""Refuse bodies of SGLang's routes with fields of ours, which SGLang would silently ignore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette._utils import get_route_path
from starlette.types import Message, Receive, Scope, Send

from sglang_inflight.frontend.as_sglang import our_fields
from sglang_inflight.frontend.http.endpoints import refusal
from sglang_inflight.vocabulary.bodies import Body
from sglang_inflight.vocabulary.errors import InflightError


class RefuseFields:
    """ASGI middleware: refuse bodies with a field of ours. Null and default values pass."""

    def __init__(
        self,
        app: Any,
        *,
        shapes: Mapping[str, type[Body]],
        refuse: Callable[[list[str]], InflightError],
    ) -> None:
        """``shapes`` has our fields by path. ``refuse`` returns the error for fields' names."""
        self._app = app
        self._shapes = shapes
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shape = self._shapes.get(get_route_path(scope)) if scope["type"] == "http" else None
        if shape is None:
            await self._app(scope, receive, send)
            return
        messages = await _whole_body(receive)
        named = find_our_fields(b"".join(m.get("body", b"") for m in messages), shape)
        if named:
            await refusal(self._refuse(named))(scope, receive, send)
            return
        messages.reverse()

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)


def find_our_fields(content: bytes, shape: type[Body]) -> list[str]:
    """Return our fields set to a non-default value in the body."""
    defaults = our_fields(shape)
    # decoding skips all other fields, which may hold whole tensors
    ours = msgspec.defstruct("_Ours", [(name, Any, msgspec.UNSET) for name in defaults])
    try:
        given = msgspec.json.decode(content or b"{}", type=ours)
    except (msgspec.DecodeError, RecursionError):
        # SGLang reports the malformed body
        return []
    nothing = (None, msgspec.UNSET)
    return [
        name
        for name, default in defaults.items()
        if (value := getattr(given, name)) not in nothing and value != default
    ]


async def _whole_body(receive: Receive) -> list[Message]:
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages

"""Sends a layout once, and its digest from then on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sglang_inflight.client.answers import Json
from sglang_inflight.vocabulary.errors import UnknownLayout

_LISTS = ("names", "dtypes", "shapes")
# a server keeps as many at most
_MOST = 4096


class SentLayouts:
    """Digests of the layouts that one server has taken. Belongs to its client's event loop."""

    def __init__(self) -> None:
        # the last sent ones at the end
        self._sent: dict[str, None] = {}

    async def send(self, send: Callable[..., Awaitable[Json]], body: Json) -> Json:
        """Return the answer to ``body``, sent without the layout if the server has taken it before.

        A server that does not keep it any more (it was restarted, or had many others) changes
        nothing. It gets the whole body then.
        """
        digest = body.get("layout_digest")
        if digest is None or any(body.get(name) is None for name in _LISTS):
            return await send(**body)
        if digest in self._sent:
            short = {name: value for name, value in body.items() if name not in _LISTS}
            try:
                return await send(**short)
            except UnknownLayout:
                self._sent.pop(digest, None)
        answer = await send(**body)
        self._sent.pop(digest, None)
        self._sent[digest] = None
        if len(self._sent) > _MOST:
            del self._sent[next(iter(self._sent))]
        return answer

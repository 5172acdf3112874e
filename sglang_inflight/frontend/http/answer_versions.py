"""Headers that say which versions made an answer, and what is served when there is none.

A whole answer's headers have the versions at its start and at its end. A stream's headers are sent
before its tokens, so they have only the version at the start: the first chunk's, or what is served
when the headers are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from starlette._utils import get_route_path
from starlette.types import Message, Receive, Scope, Send

from sglang_inflight.vocabulary.errors import RetryLater
from sglang_inflight.vocabulary.labels import VersionLabel

ROUTES = frozenset(
    (
        "/generate",
        "/v1/completions",
        "/v1/chat/completions",
        "/inference/v1/generate",
        "/skyrl/v1/generate",
    )
)
VERSION = "x-inflight-weight-version"
EPOCH = "x-inflight-epoch"
_SCOPE = "inflight_versions"
_ASCII = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


class AnswerVersions:
    """Notes of the front end about one HTTP request, for its answer's headers."""

    def __init__(self) -> None:
        # a door has let the request through
        self.is_let_through = False
        # spans of ``meta_info``: an output's first, and a whole answer's last
        self.start: Mapping[str, Any] | None = None
        self.end: Mapping[str, Any] | None = None

    @staticmethod
    def of(request: Any) -> AnswerVersions:
        """Return the request's notes, on a route without headers those that nobody reads."""
        scope = getattr(request, "scope", {})
        notes: AnswerVersions = scope.setdefault(_SCOPE, AnswerVersions())
        return notes

    def note(self, answer: Any, *, is_whole: bool) -> None:
        """Note the spans of an answer, or of a stream's chunk."""
        if self.start is not None:
            return
        outputs = answer if isinstance(answer, list) else [answer]
        spans = [s for each in outputs if (s := each.get("meta_info", {}).get("weight_versions"))]
        if spans:
            self.start = min((each[0] for each in spans), key=_epoch)
            if is_whole:
                self.end = max((each[-1] for each in spans), key=_epoch)


class AnswerHeaders:
    """ASGI middleware: add the headers to answers of the generating routes."""

    def __init__(self, app: Any, *, label: Callable[[], VersionLabel]) -> None:
        self._app = app
        self._label = label

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or get_route_path(scope) not in ROUTES:
            await self._app(scope, receive, send)
            return
        notes = scope[_SCOPE] = AnswerVersions()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message.get("headers", ())}
                added = self._headers(notes, message["status"])
                message = {
                    **message,
                    "headers": [
                        *message.get("headers", ()),
                        *((name, value) for name, value in added if name not in given),
                    ],
                }
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _headers(self, notes: AnswerVersions, status: int) -> list[tuple[bytes, bytes]]:
        if status == HTTPStatus.OK:
            label = self._label()
            start = notes.start or {"version": label.version, "epoch": label.epoch}
            headers = _of_span(start, "-start")
            if notes.end is not None:
                headers |= _of_span(notes.end, "-end")
        elif status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers = headers_of(RetryLater("", self._label()))
        else:
            headers = {}
        return [(name.encode(), value.encode()) for name, value in headers.items()]


def headers_of(error: Exception) -> dict[str, str]:
    """Return the headers of a refusal, for ``RetryLater`` alone."""
    if not isinstance(error, RetryLater):
        return {}
    headers = {"retry-after": str(error.retry_after_s)}
    if error.served is not None:
        headers |= _of_span(error.served._asdict(), "")
    return headers


def content_of(error: Exception) -> dict[str, Any]:
    """Return what a refusal's body says of the served version, for ``RetryLater`` alone."""
    if not isinstance(error, RetryLater) or error.served is None:
        return {}
    return {"weight_version": error.served.version, "epoch": error.served.epoch}


def _of_span(span: Mapping[str, Any], suffix: str) -> dict[str, str]:
    # a header is ASCII, and a version's name may not be
    headers = {VERSION + suffix: quote(span["version"], safe=_ASCII)}
    if "epoch" in span:
        headers[EPOCH + suffix] = str(span["epoch"])
    return headers


def _epoch(span: Mapping[str, Any]) -> int:
    epoch: int = span.get("epoch", 0)
    return epoch

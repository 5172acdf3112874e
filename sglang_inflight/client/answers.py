"""Read a response: an answer, a session's answers, or the error named by the server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec

from sglang_inflight.vocabulary.answers import Answer, Begun, Receipt
from sglang_inflight.vocabulary.errors import (
    ERRORS,
    Conflict,
    InflightError,
    NotOffered,
    OutcomeUnknown,
    Refused,
    TooLarge,
)
from sglang_inflight.vocabulary.version import VERSION, why_not_together


class NoAnswer(OutcomeUnknown):
    """The server did not answer within the call's time limit."""


class WrongAnswer(OutcomeUnknown):
    """The response is no answer of ours: the server or a proxy is broken."""


Json = dict[str, Any]

A = TypeVar("A", bound=Answer)

# For bodies without an error of ours, from SGLang's routes or from a proxy. Any other 4xx is
# Refused.
_BY_STATUS: dict[int, type[InflightError]] = {
    408: OutcomeUnknown,
    409: Conflict,
    413: TooLarge,
    501: NotOffered,
    504: OutcomeUnknown,
}
# bytes of a wrong answer shown in an error
_SHOWN = 500
# limit of a body: 20 times the status of a thousand ranks
MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Reply:
    """A response with its body, read up to ``MOST_BYTES``.

    The body is decoded as UTF-8 whatever its charset header says: a proxy's page may say anything.
    """

    response: httpx.Response
    content: bytes
    is_whole: bool

    @property
    def shown(self) -> str:
        return self.content[:_SHOWN].decode(errors="replace")


async def read_reply(response: httpx.Response) -> Reply:
    """Read at most ``MOST_BYTES`` of the body, because a broken peer may never end it."""
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > MOST_BYTES:
            return Reply(response, bytes(content[:MOST_BYTES]), is_whole=False)
    return Reply(response, bytes(content), is_whole=True)


def read_json(reply: Reply) -> Json:
    """Return the body. Raises the error named in the response, or ``WrongAnswer`` if it is no JSON.

    Raises ``httpx.HTTPStatusError`` for a server error without an error of ours.
    """
    response = reply.response
    body = _decode(reply)
    error = _find_error(reply, body)
    if error is not None:
        error.add_note(f"{response.request.method} {response.url}")
        raise error
    response.raise_for_status()
    if body is None:
        kind = "no JSON object" if reply.is_whole else f"more than {MOST_BYTES} bytes"
        raise WrongAnswer(
            f"{response.url} answered {response.status_code} with {kind}: {reply.shown!r}"
        )
    return body


def read_answer(url: str, body: Json, shape: type[A]) -> A:
    """Return ``body`` as a ``shape``, without unknown fields.

    Raises ``WrongAnswer`` if it does not fit, and ``NotOffered`` if the server runs without us.
    """
    if body.get("active") is False:
        raise NotOffered(str(body.get("message")))
    try:
        return msgspec.convert(body, shape)
    except msgspec.ValidationError as error:
        raise WrongAnswer(f"{url} answered with no {shape.__name__}: {error}") from error


def says_inactive(reply: Reply) -> str | None:
    """Return why ``/inflight/status`` says that the server takes no calls of ours, or None."""
    if reply.response.status_code == 404:
        return (
            f"{reply.response.url} is not there: the server runs without SGLang Inflight, and "
            "would ignore its fields. Install sglang-inflight beside the server's SGLang, and add "
            "it to SGLANG_PLUGINS if that is set"
        )
    body = _decode(reply) or {}
    return str(body.get("message")) if body.get("active") is False else None


def says_other_version(reply: Reply) -> str | None:
    """Return why ``/inflight/status`` is that of a server which needs another client, or None."""
    server = (_decode(reply) or {}).get("inflight_version")
    return why_not_together(VERSION, str(server)) if server else None


def say_why(reply: Reply) -> str:
    """Return the sentence in an answer that is no success."""
    return _find_sentence(reply, _decode(reply), None)


def _decode(reply: Reply) -> Json | None:
    try:
        body = json.loads(reply.content)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _find_error(reply: Reply, body: Json | None) -> InflightError | None:
    response = reply.response
    if response.is_success:
        return None
    inner = body.get("error") if body is not None else None
    name = inner.get("type") if isinstance(inner, dict) else None
    kind = ERRORS.get(name) if isinstance(name, str) else None
    if kind is None:
        kind = _BY_STATUS.get(response.status_code)
    if kind is None and response.is_client_error:
        kind = Refused
    return kind(_find_sentence(reply, body, inner)) if kind is not None else None


def _find_sentence(reply: Reply, body: Json | None, inner: object) -> str:
    said = (body or {}).get("message")
    if said is None and isinstance(inner, dict):
        said = inner.get("message")
    elif said is None:
        # SGLang's answer to a wrong key: "error" is a text
        said = inner
    return str(said or reply.shown or reply.response.reason_phrase)


class Session(Mapping[str, Any]):
    """A session of ``Client``. After its block, ``receipt`` is set and its fields are keys here."""

    def __init__(self, begun: Begun) -> None:
        self._begun = begun
        self.receipt: Receipt | None = None

    @property
    def session_id(self) -> str:
        """Id of the session, for calls sent by other means than this client."""
        return self._begun.session_id

    def as_json(self) -> dict[str, Any]:
        receipt = self.receipt.as_json() if self.receipt is not None else {}
        return self._begun.as_json() | receipt

    def __getitem__(self, name: str) -> Any:
        return self._content()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content())

    def __len__(self) -> int:
        return len(self._content())

    def _content(self) -> dict[str, Any]:
        return {**self._begun} if self.receipt is None else {**self._begun, **self.receipt}

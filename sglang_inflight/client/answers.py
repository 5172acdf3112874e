"""What a response says: an answer, or the error that the server named."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec

from sglang_inflight.answer import Answer
from sglang_inflight.client.unheard import WrongAnswer
from sglang_inflight.errors import (
    ERRORS,
    Conflict,
    InflightError,
    NotOffered,
    OutcomeUnknown,
    Refused,
    TooLarge,
)

Json = dict[str, Any]

A = TypeVar("A", bound=Answer)

# Where the body names no error of ours: upstream's routes, and what stands before a server.
# Any other 4xx is a refusal, too.
_BY_STATUS: dict[int, type[InflightError]] = {
    408: OutcomeUnknown,
    409: Conflict,
    413: TooLarge,
    501: NotOffered,
    504: OutcomeUnknown,
}
# of a page that somebody sends instead of an answer
_SHOWN = 500
# of a body: the status of a thousand ranks has a twentieth of it
MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Heard:
    """A response, and its body as far as it was read.

    The body is read as bytes of UTF-8, whatever its page says of it: a page that does not come
    from the server may say anything.
    """

    response: httpx.Response
    content: bytes
    is_whole: bool

    @property
    def shown(self) -> str:
        return self.content[:_SHOWN].decode(errors="replace")


async def hear(response: httpx.Response) -> Heard:
    """No more of the body than any answer has, because what it comes from may never end it."""
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > MOST_BYTES:
            return Heard(response, bytes(content[:MOST_BYTES]), is_whole=False)
    return Heard(response, bytes(content), is_whole=True)


def read_json(heard: Heard) -> Json:
    """Raises the error that the response names, ``WrongAnswer`` where it is no answer at all.

    Raises ``httpx.HTTPStatusError`` for a fault of the server that names no error.
    """
    response = heard.response
    body = _decode(heard)
    error = _find_error(heard, body)
    if error is not None:
        error.add_note(f"{response.request.method} {response.url}")
        raise error
    response.raise_for_status()
    if body is None:
        kind = "no JSON object" if heard.is_whole else f"more than {MOST_BYTES} bytes"
        raise WrongAnswer(
            f"{response.url} answered {response.status_code} with what is {kind}: {heard.shown!r}"
        )
    return body


def read_answer(url: str, body: Json, shape: type[A]) -> A:
    """Raises ``WrongAnswer`` where it is another one; fields that it has besides are left out.

    Raises ``NotOffered`` where the server says that it runs without us.
    """
    if body.get("active") is False:
        raise NotOffered(str(body.get("message")))
    try:
        return msgspec.convert(body, shape)
    except msgspec.ValidationError as error:
        raise WrongAnswer(f"{url} answered with what is no {shape.__name__}: {error}") from error


def says_inactive(heard: Heard) -> str | None:
    """Why the server's ``/inflight/status`` says that no call of ours is taken, if it does."""
    if heard.response.status_code == 404:
        return (
            f"{heard.response.url} is not there: the server runs without SGLang Inflight, and "
            "would pass over what only that takes. Is the package installed beside the server's "
            "SGLang, and does SGLANG_PLUGINS, where it is set, name it?"
        )
    body = _decode(heard) or {}
    return str(body.get("message")) if body.get("active") is False else None


def _decode(heard: Heard) -> Json | None:
    try:
        body = json.loads(heard.content)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _find_error(heard: Heard, body: Json | None) -> InflightError | None:
    response = heard.response
    if response.is_success:
        return None
    inner = body.get("error") if body is not None else None
    name = inner.get("type") if isinstance(inner, dict) else None
    kind = ERRORS.get(name) if isinstance(name, str) else None
    if kind is None:
        kind = _BY_STATUS.get(response.status_code)
    if kind is None and response.is_client_error:
        kind = Refused
    return kind(_find_sentence(heard, body, inner)) if kind is not None else None


def _find_sentence(heard: Heard, body: Json | None, inner: object) -> str:
    said = (body or {}).get("message")
    if said is None and isinstance(inner, dict):
        said = inner.get("message")
    elif said is None:
        # as upstream says that a key is wrong
        said = inner
    return str(said or heard.shown or heard.response.reason_phrase)

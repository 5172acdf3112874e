"""What a response says: an answer, or the error that the server named."""

from __future__ import annotations

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


def read_json(response: httpx.Response) -> Json:
    """Raises the error that the response names, ``WrongAnswer`` where it is no answer at all.

    Raises ``httpx.HTTPStatusError`` for a fault of the server that names no error.
    """
    body = _decode(response)
    error = _find_error(response, body)
    if error is not None:
        error.add_note(f"{response.request.method} {response.url}")
        raise error
    response.raise_for_status()
    if body is None:
        raise WrongAnswer(
            f"{response.url} answered {response.status_code} with what is no JSON object: "
            f"{response.text[:_SHOWN]!r}"
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


def _decode(response: httpx.Response) -> Json | None:
    try:
        body = response.json()
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _find_error(response: httpx.Response, body: Json | None) -> InflightError | None:
    if response.is_success:
        return None
    inner = body.get("error") if body is not None else None
    name = inner.get("type") if isinstance(inner, dict) else None
    kind = ERRORS.get(name) if isinstance(name, str) else None
    if kind is None:
        kind = _BY_STATUS.get(response.status_code)
    if kind is None and response.is_client_error:
        kind = Refused
    return kind(_find_sentence(response, body, inner)) if kind is not None else None


def _find_sentence(response: httpx.Response, body: Json | None, inner: object) -> str:
    said = (body or {}).get("message")
    if said is None and isinstance(inner, dict):
        said = inner.get("message")
    elif said is None:
        # as upstream says that a key is wrong
        said = inner
    return str(said or response.text[:_SHOWN] or response.reason_phrase)

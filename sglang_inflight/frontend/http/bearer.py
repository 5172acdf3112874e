"""Keys of HTTP requests, compared whatever bytes they have."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

_KEPT = "".join(sorted({*string.printable} - {"%"}))


def decide_request_auth(
    decide: Callable[..., Any],
    *,
    authorization_header: str | None,
    api_key: str | None,
    admin_api_key: str | None,
    **others: Any,
) -> Any:
    """SGLang compares texts by a function that takes ASCII alone."""
    return decide(
        # a header's bytes, of which Starlette makes a character each
        authorization_header=_to_ascii(authorization_header, "latin-1"),
        api_key=_to_ascii(api_key, "utf-8"),
        admin_api_key=_to_ascii(admin_api_key, "utf-8"),
        **others,
    )


def _to_ascii(text: str | None, encoding: str) -> str | None:
    """Different bytes stay different."""
    if text is None:
        return None
    return quote(text.encode(encoding, "surrogateescape"), safe=_KEPT)

"""API keys beyond ASCII.

This module hooks ``decide_request_auth``.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from sglang_inflight.hooking import AROUND, hook

_KEPT = "".join(sorted({*string.printable} - {"%"}))


@hook("sglang.srt.utils.auth.decide_request_auth", AROUND)
def decide_request_auth(
    decide: Callable[..., Any],
    *,
    authorization_header: str | None,
    api_key: str | None,
    admin_api_key: str | None,
    **others: Any,
) -> Any:
    """Escape non-ASCII in keys: SGLang's comparison raises on non-ASCII text."""
    return decide(
        # Starlette decodes a header's bytes as latin-1
        authorization_header=_to_ascii(authorization_header, "latin-1"),
        api_key=_to_ascii(api_key, "utf-8"),
        admin_api_key=_to_ascii(admin_api_key, "utf-8"),
        **others,
    )


def _to_ascii(text: str | None, encoding: str) -> str | None:
    """Percent-encode ``text``; different bytes give different results."""
    if text is None:
        return None
    return quote(text.encode(encoding, "surrogateescape"), safe=_KEPT)

"""What callers sent, as far as a message repeats it."""

from __future__ import annotations

_MOST = 200


def shorten(text: str) -> str:
    """``text`` with its middle left out where it is long, and on one line."""
    text = text.partition("\n")[0]
    if len(text) <= _MOST:
        return text
    half = _MOST // 2
    return f"{text[:half]}…{text[-half:]}"

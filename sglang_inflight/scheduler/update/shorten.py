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


def list_names(names: list[str], most: int = 8) -> str:
    """The first ``most`` of ``names``, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

"""Short texts for error messages: callers' texts, names of tensors, and other errors."""

from __future__ import annotations

_MOST = 200


def shorten(text: str) -> str:
    """Return the first line of ``text``, without its middle if it is long."""
    text = text.partition("\n")[0]
    if len(text) <= _MOST:
        return text
    half = _MOST // 2
    return f"{text[:half]}…{text[-half:]}"


def list_names(names: list[str], most: int = 8) -> str:
    """Return the first ``most`` of ``names``, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def describe(error: BaseException) -> str:
    """Return ``error`` in a few words, without the path in an ``OSError``."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return shorten(str(error)) or type(error).__name__

"""Digests of prompts. Imports no SGLang, because clients compare them, too."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def digest_of(tokens: Sequence[int]) -> str:
    """Return 16 hex digits of the tokens' SHA-256, each in 4 bytes, the lowest first."""
    return hashlib.sha256(array("i", tokens).tobytes()).hexdigest()[:16]

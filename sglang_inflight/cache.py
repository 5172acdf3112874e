"""Folder of our caches: files slow to fetch or to make."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache() -> Path:
    """Return ``SGLANG_INFLIGHT_CACHE``, or our folder among this user's caches."""
    chosen = os.environ.get("SGLANG_INFLIGHT_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-inflight"

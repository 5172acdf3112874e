"""Folder of our caches: files slow to fetch or to make."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

logger = logging.getLogger(__name__)

T = TypeVar("T")


def default_cache() -> Path:
    """Return ``SGLANG_INFLIGHT_CACHE``, or our folder among this user's caches."""
    chosen = os.environ.get("SGLANG_INFLIGHT_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-inflight"


def read_kept(file: Path, what: str, decode: Callable[[bytes], T]) -> T | None:
    """Return the decoded content of ``file``; None, and a warning in the log, if it has none.

    ``what`` names the content in the log. ``decode`` raises ``msgspec.DecodeError``.
    """
    try:
        return decode(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("A remembered %s cannot be read: %s", what, error)
    except msgspec.DecodeError as error:
        logger.warning("A remembered %s is not one, and is found anew: %s", what, error)
    return None


def keep(file: Path, content: bytes, what: str) -> None:
    """Write ``content`` to ``file``, whole or not at all. ``what`` names it in the log."""
    partly = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partly.write_bytes(content)
        partly.replace(file)
    except OSError as error:
        logger.warning("A %s is not remembered: %s", what, error)

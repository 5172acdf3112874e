"""Event streams of ``/generate`` and of the OpenAI routes."""

from __future__ import annotations

import json
from typing import Any


def read_event(line: str | bytes) -> Any:
    """Return a stream line's JSON, or None for a comment, a blank line and the end."""
    text = line.decode() if isinstance(line, bytes) else line
    data = text.removeprefix("data:").strip()
    return json.loads(data) if text.startswith("data:") and data != "[DONE]" else None

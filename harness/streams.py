"""Event streams, as ``/generate`` and the OpenAI routes write them."""

from __future__ import annotations

import json
from typing import Any


def read_event(line: str | bytes) -> Any:
    """The JSON that a line of the stream carries, or None: a comment, a blank, the end."""
    text = line.decode() if isinstance(line, bytes) else line
    data = text.removeprefix("data:").strip()
    return json.loads(data) if text.startswith("data:") and data != "[DONE]" else None

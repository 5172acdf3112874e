"""Looks at an adapter's folder before SGLang reads it on the schedulers' threads.

SGLang opens what it finds there: a pipe without a writer would hold a scheduler for ever, and a
link to a device would fill its memory.
"""

from __future__ import annotations

import os

from sglang_inflight.vocabulary.errors import Refused, shorten

_READ = (".json", ".safetensors", ".bin", ".pt")
# decoding holds the interpreter
_CONFIGS = ("adapter_config.json", "added_tokens.json")
_MOST_CONFIG_BYTES = 4 << 20


def refuse_irregular(path: str | None) -> None:
    """Raise ``Refused`` for a file that SGLang must not read. A name on the Hub passes.

    Blocks as long as the file system does.
    """
    if path is None or not os.path.isdir(path):
        return
    with os.scandir(path) as entries:
        for entry in entries:
            if not entry.name.endswith(_READ):
                continue
            if not entry.is_file():
                raise Refused(f"{entry.name} in {shorten(path)!r} is no regular file")
            size = entry.stat().st_size
            if entry.name in _CONFIGS and size > _MOST_CONFIG_BYTES:
                raise Refused(
                    f"{entry.name} in {shorten(path)!r} has {size} bytes, at most "
                    f"{_MOST_CONFIG_BYTES} are allowed"
                )

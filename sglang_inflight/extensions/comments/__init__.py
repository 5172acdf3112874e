"""Empty lines in event streams during a pause, so that proxies keep the connections."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_inflight.extension import Extension
from sglang_inflight.settings import boolean, read, seconds, setting


@dataclass(frozen=True)
class CommentsSettings:
    sse_comment_s: float = setting(
        15.0,
        seconds,
        "how often a silent event stream gets an empty line while paused, in seconds; 0 is never",
    )
    sse_comment: bool = setting(False, boolean, "put the pause's mode into that line, as a comment")


EXTENSION = Extension(
    name="comments",
    modules=("sglang_inflight.extensions.comments.pause_comments",),
    settings=CommentsSettings,
    is_on=lambda: read(CommentsSettings).sse_comment_s > 0,
)

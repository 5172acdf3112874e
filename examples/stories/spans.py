"""Which weights made which token of a story, and which text that is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Output tokens ``start`` to ``end`` (exclusive) were made by ``version``."""

    version: str
    start: int
    end: int


def read_spans(meta_info: dict[str, Any]) -> list[Span]:
    return [
        Span(span["version"], span["start"], span["end"])
        for span in meta_info.get("weight_versions") or []
    ]


def cover_exactly(spans: Sequence[Span], tokens: int) -> bool:
    """Whether each of ``tokens`` tokens lies in one span, and no span is empty."""
    reached = 0
    for span in spans:
        if span.start != reached or span.end <= span.start:
            return False
        reached = span.end
    return reached == tokens


def in_order(spans: Iterable[Span], versions: Sequence[str]) -> bool:
    """Whether the spans follow ``versions``, each at most once. Some may be missing."""
    remaining = iter(versions)
    return all(span.version in remaining for span in spans)

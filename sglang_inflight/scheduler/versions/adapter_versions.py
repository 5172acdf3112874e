"""Labels each token with its adapter.

A request has one adapter from its first token on, unless its caller moves it to another. Adapters
are written into SGLang's list of the request's version changes, as entries of ours among SGLang's.
This list is the only part of a request available to all functions that make spans, for outputs and
aborts alike. An entry holds an adapter and its first token.

A move happens when every result is processed (``Boundary.drain``). So the old adapter made exactly
the request's tokens at that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.utils.weight_versions import WeightVersionEvent

from sglang_inflight.vocabulary.labels import AdapterLabel, add_adapter

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.utils.weight_versions import WeightVersionSpan

# a version's packed label begins with a number, and never like this
_MARK = "adapter "
# version of the adapters loaded at the server's start
FIRST_VERSION = "0"


class AdapterVersions:
    """Labels of one rank's adapters. Only the scheduler's thread touches this object."""

    def __init__(self) -> None:
        # by the adapter's id; SGLang uses an id once
        self._labels: dict[str, AdapterLabel] = {}

    def remember(self, lora_id: str, label: AdapterLabel) -> None:
        self._labels[lora_id] = label

    def forget(self, lora_id: str) -> None:
        """Forget an adapter without requests. Entries in older requests stay."""
        self._labels.pop(lora_id, None)

    def begin(self, req: Req) -> None:
        """Label a request, new or retracted, on its way into the waiting queue."""
        events = req.weight_version_events
        if not (events and _is_mark(events[0])):
            events[:0] = self._marks(req, tokens=0)

    def move(self, req: Req) -> None:
        """Label the following tokens with the current adapter of ``req``."""
        # a request waiting for its grammar has not begun
        if req.weight_version_events:
            req.weight_version_events += self._marks(req, tokens=len(req.output_ids))

    def _marks(self, req: Req, *, tokens: int) -> list[Any]:
        """Return one entry, or none for a request without an adapter."""
        label = self._labels.get(req.lora_id or "")
        if label is None:
            return []
        return [WeightVersionEvent(old_version=_MARK + label.pack(), num_output_tokens=tokens)]


def split_marks(events: Sequence[Any]) -> tuple[list[Any], list[tuple[str, int]]]:
    """Return SGLang's own entries, and from ours (packed label, first token), in order."""
    own = [event for event in events if not _is_mark(event)]
    marks = [
        (event.old_version.removeprefix(_MARK), event.num_output_tokens)
        for event in events
        if _is_mark(event)
    ]
    return own, marks


def cut(spans: list[WeightVersionSpan], marks: list[tuple[str, int]]) -> list[WeightVersionSpan]:
    """Cut ``spans`` at changes of the adapter, and add its label to the version's text."""
    bounds = [0, *(start for _, start in marks[1:]), spans[-1].end]
    pieces = [
        _piece(span, label, max(span.start, start), min(span.end, end))
        for span in spans
        for (label, _), (start, end) in zip(marks, pairwise(bounds), strict=True)
        if max(span.start, start) < min(span.end, end)
    ]
    # without tokens return one empty span, with the current adapter
    return pieces or [_piece(spans[-1], marks[-1][0], spans[-1].start, spans[-1].end)]


def _piece(span: Any, adapter: str, start: int, end: int) -> WeightVersionSpan:
    piece: WeightVersionSpan = msgspec.structs.replace(
        span, version=add_adapter(span.version, adapter), start=start, end=end
    )
    return piece


def _is_mark(event: Any) -> bool:
    named: str = event.old_version
    return named.startswith(_MARK)

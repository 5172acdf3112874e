"""Which adapter made which token.

A request has one adapter from its first token on, unless its caller moves it to another. Both
are written into SGLang's list of the request's changes of version, as entries of ours among
its own, because whoever makes spans of a request has that list and nothing else of it: outputs
and aborts alike. They say from which token on an adapter is in use.

A move happens when every result is processed (``Boundary.drain``). So the tokens that a request
has then are all that its old adapter made.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.utils.weight_versions import WeightVersionEvent

from sglang_inflight.version_label import AdapterLabel, add_adapter

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.req import Req
    from sglang_inflight.sglang_types.weight_versions import WeightVersionSpan

# no version's packed label begins like this: it begins with a number
_MARK = "adapter "
# of adapters that came with the server's start
FIRST_VERSION = "0"


class AdapterVersions:
    """What the adapters of one rank are called. Only the scheduler's thread touches it."""

    def __init__(self) -> None:
        # by the id of the adapter, which SGLang uses once
        self._labels: dict[str, AdapterLabel] = {}

    def remember(self, lora_id: str, label: AdapterLabel) -> None:
        self._labels[lora_id] = label

    def forget(self, lora_id: str) -> None:
        """No request has the adapter any more. What is written into older ones stays there."""
        self._labels.pop(lora_id, None)

    def begin(self, req: Req) -> None:
        """A request, new or retracted, enters the waiting queue."""
        events = req.weight_version_events
        if not (events and _is_mark(events[0])):
            events[:0] = self._marks(req, tokens=0)

    def move(self, req: Req) -> None:
        """The tokens from now on are made with the adapter that ``req`` has now."""
        # one that waits for its grammar has not begun
        if req.weight_version_events:
            req.weight_version_events += self._marks(req, tokens=len(req.output_ids))

    def _marks(self, req: Req, *, tokens: int) -> list[Any]:
        """One, or none for a request without an adapter."""
        label = self._labels.get(req.lora_id or "")
        if label is None:
            return []
        return [WeightVersionEvent(old_version=_MARK + label.pack(), num_output_tokens=tokens)]


def split_marks(events: Sequence[Any]) -> tuple[list[Any], list[tuple[str, int]]]:
    """SGLang's own entries, and of ours the packed label with its first token, in order."""
    own = [event for event in events if not _is_mark(event)]
    marks = [
        (event.old_version.removeprefix(_MARK), event.num_output_tokens)
        for event in events
        if _is_mark(event)
    ]
    return own, marks


def cut(spans: list[WeightVersionSpan], marks: list[tuple[str, int]]) -> list[WeightVersionSpan]:
    """``spans``, each within one adapter, whose label is in the text of its version."""
    bounds = [0, *(start for _, start in marks[1:]), spans[-1].end]
    pieces = [
        _piece(span, label, max(span.start, start), min(span.end, end))
        for span in spans
        for (label, _), (start, end) in zip(marks, pairwise(bounds), strict=True)
        if max(span.start, start) < min(span.end, end)
    ]
    # of no token at all there is an empty span, of who would have made one
    return pieces or [_piece(spans[-1], marks[-1][0], spans[-1].start, spans[-1].end)]


def _piece(span: Any, adapter: str, start: int, end: int) -> WeightVersionSpan:
    piece: WeightVersionSpan = msgspec.structs.replace(
        span, version=add_adapter(span.version, adapter), start=start, end=end
    )
    return piece


def _is_mark(event: Any) -> bool:
    named: str = event.old_version
    return named.startswith(_MARK)

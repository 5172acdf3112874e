"""Labels each token with the weights and the adapter that made it.

SGLang keeps, per request, the number of output tokens at each change of the version
(``sglang.srt.utils.weight_versions``). Under overlap scheduling, and in a pipeline, this number is
too small: batches with unprocessed results were sampled with the old weights.

A token belongs to the version of its forward's launch. So the weights change at once, and the
*label* follows after the results due at that moment are processed. Results are processed in the
order of their launch, so no later batch's tokens come in between.

Every epoch has a label of its own, even if the name stays.

A request has one adapter from its first token on, unless its caller moves it to another. Adapters
are written into SGLang's list of the request's version changes, as entries of ours among SGLang's.
This list is the only part of a request available to all functions that make spans, for outputs and
aborts alike. An entry holds an adapter and its first token.

A request pinned to a version has one label for all tokens: an entry of ours, the first of the list,
holds it.

A move happens when every result is processed (``Boundary.drain``). So the old adapter made exactly
the request's tokens at that moment.

This module hooks ``Scheduler.record_weight_version_change``, ``Scheduler.process_batch_result`` and
``compute_weight_version_spans``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.utils.weight_versions import WeightVersionEvent, record_weight_version_events

from sglang_inflight.hooking import AFTER, AROUND, REPLACE, SCHEDULER, hook
from sglang_inflight.scheduler.requests import Requests
from sglang_inflight.scheduler.versions.kv_versions import KVVersions
from sglang_inflight.sglang_types import get_context, get_serving
from sglang_inflight.vocabulary.labels import AdapterLabel, VersionLabel, add_adapter

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.utils.weight_versions import WeightVersionSpan

# The epoch of the results processed now. Global like SGLang's version name: functions that write
# spans have no other access to it.
_epoch = 0
# a version's packed label begins with a number, and never like this
_MARK = "adapter "
_PINNED = "pinned "


# the module that defines it: SGLang then replaces the name in every importing module
@hook("sglang.srt.utils.weight_versions.compute_weight_version_spans", AROUND)
def write_spans(
    compute: Callable[..., Any], events: Any, current_version: str, num_output_tokens: int
) -> Any:
    """Wrap SGLang's function: give the last span this epoch, as each event has its own."""
    packed = _pack(_epoch, current_version)
    # called for each chunk of each stream
    if not events:
        return compute(events, current_version=packed, num_output_tokens=num_output_tokens)
    changes, marks = split_marks(events)
    if (pinned := pinned_label(events)) is not None:
        # tokens of another server keep their labels
        changes = [each for each in changes if VersionLabel.unpack(each.old_version).server]
        packed = pinned.pack()
    spans = compute(changes, current_version=packed, num_output_tokens=num_output_tokens)
    return cut(spans, marks) if marks else spans


@functools.lru_cache(maxsize=2)
def _pack(epoch: int, version: str) -> str:
    return VersionLabel(epoch, version).pack()


class Versions:
    """The version label of one scheduler. Only the scheduler's thread touches this object."""

    def __init__(self, requests: Requests, kv_versions: KVVersions) -> None:
        self._requests = requests
        self._kv_versions = kv_versions
        # (last batch before the label, label) of labels waiting for results, oldest first
        self._pending: list[tuple[ScheduleBatch, VersionLabel]] = []

    @property
    def epoch(self) -> int:
        """Number of commits and rollbacks since the start."""
        return self.label.epoch

    @property
    def current(self) -> str:
        """Version of the weights in place, for the next forward."""
        return self.label.version

    @property
    def label(self) -> VersionLabel:
        """``epoch`` and ``current``."""
        return self._pending[-1][1] if self._pending else _processed()

    @property
    def processed(self) -> VersionLabel:
        """Label of the tokens in the results processed now."""
        return _processed()

    def of_first_token(self, req: Req) -> VersionLabel:
        """Return the label of the first token of ``req``; there must be one."""
        changes, _ = split_marks(req.weight_version_events)
        return VersionLabel.unpack(changes[0].old_version) if changes else _processed()

    def pin(self, req: Req, label: VersionLabel) -> None:
        """Give every token of ``req``, which has none yet, this label."""
        mark = WeightVersionEvent(old_version=_PINNED + label.pack(), num_output_tokens=0)
        req.weight_version_events.insert(0, mark)

    def forget_tokens(self, req: Req) -> None:
        """Clear the labels of ``req``: it lost its tokens and begins anew."""
        req.weight_version_events.clear()

    @property
    def changes_behind(self) -> int:
        """Number of label changes since the launch of the batch processed now."""
        return len(self._pending)

    def begin_epoch(self, version: str | None) -> None:
        """Begin the epoch of new weights. ``version`` is their name; None keeps the name."""
        now = self.label
        self._change(VersionLabel(now.epoch + 1, now.version if version is None else version))

    @hook(f"{SCHEDULER}.record_weight_version_change", REPLACE, via="inflight.versions")
    def rename(self, new_version: str | None) -> None:
        """Rename the weights in place to ``new_version``. None keeps the name."""
        now = self.label
        if new_version is not None and new_version != now.version:
            self._change(VersionLabel(now.epoch, new_version))

    @hook(f"{SCHEDULER}.process_batch_result", AFTER, via="inflight.versions")
    def after_result(self, _: None, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> None:
        """Apply the labels due after the result of ``batch``; called after every result."""
        while self._pending and self._pending[0][0] is batch:
            self._put(self._pending.pop(0)[1])

    def _change(self, label: VersionLabel) -> None:
        self._kv_versions.change(self.label, label)
        batches = self._requests.pending_batches
        if batches:
            self._pending.append((batches[-1], label))
        else:
            self._put(label)

    def _put(self, label: VersionLabel) -> None:
        global _epoch
        old = _processed()
        _epoch = label.epoch
        get_context().override("scheduler.weight_version", weight_version=label.version)
        _record(self._requests.live(), old)


def _record(reqs: set[Req], old: VersionLabel) -> None:
    """Record in ``reqs`` that the tokens so far end with the label ``old``."""
    # for a re-prefill a decode server takes the last token off a request, and returns it with the
    # KV
    lack_a_token = {req for req in reqs if req.pd_rebootstrap_forced_output_id is not None}
    record_weight_version_events(reqs - lack_a_token, old_version=old.pack())
    for req in lack_a_token:
        req.weight_version_events.append(
            WeightVersionEvent(old_version=old.pack(), num_output_tokens=len(req.output_ids) + 1)
        )


def _processed() -> VersionLabel:
    """Return the label of the tokens in the results processed now."""
    return VersionLabel(_epoch, get_serving().weight_version)


class AdapterVersions:
    """Labels of one rank's adapters. Only the scheduler's thread touches this object."""

    def __init__(self) -> None:
        # labels by the adapter's id; SGLang uses an id once
        self._labels: dict[str, AdapterLabel] = {}

    def remember(self, lora_id: str, label: AdapterLabel) -> None:
        self._labels[lora_id] = label

    def forget(self, lora_id: str) -> None:
        """Forget an adapter without requests. Entries in older requests stay."""
        self._labels.pop(lora_id, None)

    def of(self, req: Req) -> AdapterLabel | None:
        """Return the label of the adapter of ``req``; None without an adapter."""
        return self._labels.get(req.lora_id or "")

    def begin(self, req: Req) -> None:
        """Label a request, new or retracted, on its way into the waiting queue."""
        events = req.weight_version_events
        if not any(_is_mark(event) for event in events):
            events[:0] = self._marks(req, tokens=0)

    def begin_after(self, req: Req, starts: Sequence[tuple[AdapterLabel, int]]) -> None:
        """Label the tokens that ``req`` has from another server, and those that follow.

        ``starts`` has the first token of each label.
        """
        theirs = [
            WeightVersionEvent(old_version=_MARK + label.pack(), num_output_tokens=start)
            for label, start in starts
        ]
        req.weight_version_events[:0] = theirs + self._marks(req, tokens=len(req.output_ids))

    def move(self, req: Req) -> None:
        """Label the following tokens with the current adapter of ``req``."""
        # a request waiting for its grammar has not begun
        if req.weight_version_events:
            req.weight_version_events += self._marks(req, tokens=len(req.output_ids))

    def _marks(self, req: Req, *, tokens: int) -> list[Any]:
        """Return one entry, or none for a request without an adapter."""
        label = self.of(req)
        if label is None:
            return []
        return [WeightVersionEvent(old_version=_MARK + label.pack(), num_output_tokens=tokens)]


def split_marks(events: Sequence[Any]) -> tuple[list[Any], list[tuple[str, int]]]:
    """Return SGLang's own entries, and from ours (packed label, first token), in order."""
    own = [event for event in events if not event.old_version.startswith((_MARK, _PINNED))]
    marks = [
        (event.old_version.removeprefix(_MARK), event.num_output_tokens)
        for event in events
        if _is_mark(event)
    ]
    return own, marks


def pinned_label(events: Sequence[Any]) -> VersionLabel | None:
    """Return the label of all tokens of a pinned request; None for any other request."""
    packed = [e.old_version for e in events if e.old_version.startswith(_PINNED)]
    return VersionLabel.unpack(packed[0].removeprefix(_PINNED)) if packed else None


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

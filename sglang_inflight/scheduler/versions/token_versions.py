"""Which weights made which token.

Upstream keeps, per request, how many output tokens there were when the version changed
(``sglang.srt.utils.weight_versions``). Under overlap scheduling, and in a pipeline, that is
too early by the tokens of batches whose results are not processed yet: they are sampled with
the old weights.

A token belongs to the version its forward was launched with. So the weights change at
once, and the *label* follows when the results that were due at that moment have been
processed. Results are processed in the order of their launch, so no later batch's tokens
can slip in between.

Every epoch has a label of its own, whatever it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.utils.weight_versions import WeightVersionEvent, record_weight_version_events

from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.versions.adapter_versions import cut, split_marks
from sglang_inflight.scheduler.versions.kv_versions import KVVersions
from sglang_inflight.sglang_types.runtime_context import get_context, get_serving
from sglang_inflight.version_label import VersionLabel

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.req import Req
    from sglang_inflight.scheduler.sglang_types.schedule_batch import ScheduleBatch

# The epoch of what is processed now. The name is upstream's, and as this one it is the
# process's: functions that write spans have nothing else at hand.
_epoch = 0


def write_spans(
    compute: Callable[..., Any], events: Any, current_version: str, num_output_tokens: int
) -> Any:
    """Around upstream's function: the last span is of this epoch, as each event is of its own."""
    label = VersionLabel(_epoch, current_version)
    changes, marks = split_marks(events)
    spans = compute(changes, current_version=label.pack(), num_output_tokens=num_output_tokens)
    return cut(spans, marks) if marks else spans


class Versions:
    """The version label of one scheduler. Only the scheduler's thread touches it."""

    def __init__(self, boundary: Boundary, kv_versions: KVVersions) -> None:
        self._boundary = boundary
        self._kv_versions = kv_versions
        # labels that wait for results, oldest first: (the last of those batches, label)
        self._pending: list[tuple[ScheduleBatch, VersionLabel]] = []

    @property
    def epoch(self) -> int:
        """Counts commits and rollbacks since the start."""
        return self.label.epoch

    @property
    def current(self) -> str:
        """The version of the weights in place, which the next forward is launched with."""
        return self.label.version

    @property
    def label(self) -> VersionLabel:
        """``epoch`` and ``current``."""
        return self._pending[-1][1] if self._pending else _processed()

    @property
    def processed(self) -> VersionLabel:
        """Of the tokens whose results are processed now."""
        return _processed()

    def of_first_token(self, req: Req) -> VersionLabel:
        """``req`` has one, or more."""
        changes, _ = split_marks(req.weight_version_events)
        return VersionLabel.unpack(changes[0].old_version) if changes else _processed()

    def forget_tokens(self, req: Req) -> None:
        """``req`` has none of its tokens any more, and begins anew."""
        req.weight_version_events.clear()

    @property
    def changes_behind(self) -> int:
        """How many changes of the label came after the launch of what is processed now."""
        return len(self._pending)

    def begin_epoch(self, version: str | None) -> None:
        """Other weights are in place from now on. ``version`` is their name; None keeps it."""
        now = self.label
        self._change(VersionLabel(now.epoch + 1, now.version if version is None else version))

    def rename(self, version: str | None) -> None:
        """The weights in place are called ``version`` from now on. None keeps the name."""
        now = self.label
        if version is not None and version != now.version:
            self._change(VersionLabel(now.epoch, version))

    def after_result(self, batch: ScheduleBatch) -> None:
        """Called after every processed result."""
        while self._pending and self._pending[0][0] is batch:
            self._put(self._pending.pop(0)[1])

    def _change(self, label: VersionLabel) -> None:
        self._kv_versions.change(self.label, label)
        batches = self._boundary.pending_batches
        if batches:
            self._pending.append((batches[-1], label))
        else:
            self._put(label)

    def _put(self, label: VersionLabel) -> None:
        global _epoch
        old = _processed()
        _epoch = label.epoch
        get_context().override("scheduler.weight_version", weight_version=label.version)
        _record(self._boundary.live_requests(), old)


def _record(reqs: set[Req], old: VersionLabel) -> None:
    """The tokens that ``reqs`` have were made by ``old``, or by what came before."""
    # a decode server that sends for a prompt again takes the last token off a request, and gives
    # it back with the KV
    lack_a_token = {req for req in reqs if req.pd_rebootstrap_forced_output_id is not None}
    record_weight_version_events(reqs - lack_a_token, old_version=old.pack())
    for req in lack_a_token:
        req.weight_version_events.append(
            WeightVersionEvent(old_version=old.pack(), num_output_tokens=len(req.output_ids) + 1)
        )


def _processed() -> VersionLabel:
    """Of the tokens whose results are processed now."""
    return VersionLabel(_epoch, get_serving().weight_version)

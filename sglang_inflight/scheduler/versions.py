"""Which weights made which token.

Upstream keeps, per request, how many output tokens there were when the version changed
(``sglang.srt.utils.weight_versions``). Under overlap scheduling, and in a pipeline, that is
too early by the tokens of batches whose results are not processed yet: they are sampled with
the old weights.

A token belongs to the version its forward was launched with. So the weights change at
once, and the *label* follows when the results that were due at that moment have been
processed. Results are processed in the order of their launch, so no later batch's tokens
can slip in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_context, get_serving
from sglang.srt.utils.weight_versions import record_weight_version_events

from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.kv_versions import KVVersions

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler


class Versions:
    """The version label of one scheduler. Only the scheduler's thread touches it."""

    def __init__(self, scheduler: Scheduler, boundary: Boundary, kv_versions: KVVersions) -> None:
        self._scheduler = scheduler
        self._boundary = boundary
        self._kv_versions = kv_versions
        self._epoch = 0
        # labels that wait for results, oldest first: (the last of those batches, label)
        self._pending: list[tuple[ScheduleBatch, str]] = []

    @property
    def epoch(self) -> int:
        """Counts commits and rollbacks since the start."""
        return self._epoch

    @property
    def current(self) -> str:
        """The version of the weights in place, which the next forward is launched with."""
        return self._pending[-1][1] if self._pending else get_serving().weight_version

    @property
    def changes_behind(self) -> int:
        """How many changes of the version came after the launch of what is processed now."""
        return len(self._pending)

    def begin_epoch(self) -> None:
        self._epoch += 1

    def change(self, version: str | None) -> None:
        """The weights in place are ``version`` from now on. None keeps the name."""
        if version is None or version == self.current:
            return
        self._kv_versions.change(self.current, version)
        batches = self._boundary.pending_batches
        if batches:
            self._pending.append((batches[-1], version))
        else:
            self._label(version)

    def after_result(self, batch: ScheduleBatch) -> None:
        """Called after every processed result."""
        while self._pending and self._pending[0][0] is batch:
            self._label(self._pending.pop(0)[1])

    def _label(self, version: str) -> None:
        old_version = get_serving().weight_version
        get_context().override("scheduler.weight_version", weight_version=version)
        record_weight_version_events(self._boundary.live_requests(), old_version=old_version)

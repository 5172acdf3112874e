"""Weights without the contents of a version, until updates have written them.

They come by ``SGLANG_INFLIGHT_REQUIRE_UPDATE``, by other code's writes, and where an extension
releases memory and keeps no copy. Generation is refused until updates have written each element.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.collectives import is_true_on_any_rank
from sglang_inflight.scheduler.pause.machine import PauseState
from sglang_inflight.scheduler.pause.pause import Pause
from sglang_inflight.scheduler.update.copies import Copy, copy_of
from sglang_inflight.scheduler.update.live_machine import Empty, Fill, Filled, Miss
from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.regions import MemoryRegions
from sglang_inflight.scheduler.update.staging import Staging, StagingState
from sglang_inflight.sglang_types import get_exec, get_parallel
from sglang_inflight.vocabulary.errors import BadSetting, Conflict

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import Scheduler

logger = logging.getLogger(__name__)
BRINGS_BACK = "resume_memory_occupation brings it back"


class HollowWeights:
    """Decides for all ranks. Only the scheduler's thread calls it."""

    def __init__(
        self,
        scheduler: Scheduler,
        pause: Pause,
        staging: Staging,
        live: LiveWeights,
        answers: AnswerChannel,
        *,
        on_change: Callable[[], None],
        require_update: bool,
    ) -> None:
        """``require_update``: serve no request from the weights loaded at start.

        ``on_change`` is called when the weights have been filled, or overwritten.
        """
        self._scheduler = scheduler
        self._pause = pause
        self._staging = staging
        self._live = live
        self._answers = answers
        self._on_change = on_change
        if require_update:
            if (why := staging.refusal or staging.why_not_filled) is not None:
                raise BadSetting(f"SGLANG_INFLIGHT_REQUIRE_UPDATE: {why}")
            live.move(Empty("none were sent since the start (SGLANG_INFLIGHT_REQUIRE_UPDATE)"))

    def after_filling(self) -> None:
        """Continue generation if an update has made hollow weights whole on all ranks.

        One rank alone would make a step without the others.
        """
        if is_true_on_any_rank(not isinstance(self._live.contents, Filled)):
            self._live.move(Miss("another rank misses some of them"))
            return
        self._live.move(Fill())
        was_frozen = self._pause.state is PauseState.FROZEN
        self._on_change()
        if was_frozen and self._pause.state is PauseState.RUNNING:
            self._answers.send_generation_continues()

    # ---- another writer ----------------------------------------------------------------

    def why_not_overwritten(self) -> str | None:
        """Return why the weights must not be overwritten, or None if updates can restore them."""
        if (why := self._staging.refusal) is not None:
            return f"no update could bring the weights back: {why}"
        if (why := self._why_not_held) is not None:
            return f"this server cannot hold requests back until the weights are whole: {why}"
        if self._staging.state is not StagingState.EMPTY:
            return "a weight update is open. End or abort it first"
        return None

    @property
    def _why_not_held(self) -> str | None:
        if get_parallel().pp_size > 1:
            return "the stages of a pipeline may have whole weights in different turns"
        return self._staging.can.keep_weights

    def copy_beside_updates(self) -> Copy:
        """Copy the tensors that no update brings, to restore them after another writer."""
        regions = MemoryRegions(self._scheduler)
        return copy_of(regions.tensors_not_in_checkpoints(), regions.device, _never_give_up)

    def overwritten(self, why: str) -> None:
        """Refuse generation after a write to live weights by other code, on all ranks.

        Generation is refused until updates have written each element. Where written elements are
        not counted (``InPlaceModel``), it is refused until one whole update. A server that cannot
        hold requests back goes on serving. No rollback is possible: it would restore the
        overwritten weights.
        """
        logger.warning("The contents of the weights are unknown: %s.", why)
        self._live.lose_name()
        if self._why_not_held is not None:
            return
        if self._staging.why_not_filled is None:
            self._live.move(Empty(why))
        else:
            roles = [role for role, _ in self._scheduler.weight_updater._select_runners("all")]
            self._live.write_in_place(roles, why)
        self._on_change()
        # ``/ready`` depends on it
        self._answers.send_generation_continues()

    def resumed_by_sglang(self, tags: list[str] | None) -> None:
        """Forget the version's name after SGLang's own resume, on a server without pauses.

        Without a backup the weights' contents are unknown, and SGLang serves them as they are.
        """
        saver = self._scheduler.weight_updater.memory_saver_adapter
        # the reference platform's saver keeps no backup
        is_kept = get_exec().features.enable_weights_cpu_backup and not hasattr(saver, "look_in")
        if not is_kept and (not tags or GPU_MEMORY_TYPE_WEIGHTS in tags):
            self._live.lose_name()

    def require_weights(self, who: str) -> None:
        """Raise ``Conflict`` if the weights' memory is released: ``who`` would touch it."""
        if GPU_MEMORY_TYPE_WEIGHTS in self._scheduler.weight_updater.offload_tags:
            raise Conflict(f"{who} needs the weights, and their memory is released: {BRINGS_BACK}")


def _never_give_up() -> None:
    pass

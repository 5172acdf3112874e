"""Phase two of an update: the new weights go live between two steps.

No rank can be ahead of another. A ``CommitCall`` is sent once, after every rank of every replica
voted for it. SGLang hands a control message to all ranks of a replica in the same pass of their
loops: one rank receives the message and broadcasts it. The message's handler commits. So step n
runs with the old weights on all ranks, and step n+1 with the new.

In a pipeline, a stage hands a message on ahead of the microbatch of the same pass. So the message
comes before the same microbatch in all stages. A commit that recomputes waits there until nothing
is in flight (``pause/pipeline_drain.py``). Replicas do not compute together and may be a step
apart.

A commit cannot fail: all fallible work was done while staging. The commit only swaps pointers, or
enqueues copies between existing tensors (``swap.py``). The answer comes when the swap is done, with
the time for which the swap held steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from sglang.srt.configs.load_config import LoadConfig

from sglang_inflight.messages import CommitCall, Committed, InflightCall, RollbackCall
from sglang_inflight.metrics import Metrics
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.collectives import is_true_on_any_rank
from sglang_inflight.scheduler.update.live_weights import DeviceSwap, LiveWeights, Swapped
from sglang_inflight.scheduler.update.staging import Staging
from sglang_inflight.scheduler.update.update import Sealed
from sglang_inflight.scheduler.versions.kv_ages import KVAges
from sglang_inflight.scheduler.versions.token_versions import Versions
from sglang_inflight.vocabulary.answers import WeightsStatus
from sglang_inflight.vocabulary.errors import Conflict, HalfDone, Refused
from sglang_inflight.vocabulary.kept_kv import KeptKV, require_recompute

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)


class Commits:
    """Commits and rollbacks of one rank, on the scheduler's thread."""

    def __init__(
        self,
        boundary: Boundary,
        staging: Staging,
        live: LiveWeights,
        versions: Versions,
        ages: KVAges,
        metrics: Metrics,
        layout: str,
        *,
        on_swap: Callable[[], None],
        choose_due: Callable[[list[Req]], list[Req]],
    ) -> None:
        """``layout`` names this rank's layout of the weights, for the status.

        ``on_swap`` is called after a swap, when the version is the new one, and KV the old one.
        ``choose_due`` returns which of the running requests with too old KV recompute it at once.
        """
        self._layout = layout
        self._boundary = boundary
        self._staging = staging
        self._live = live
        self._versions = versions
        self._ages = ages
        self._metrics = metrics
        self._on_swap = on_swap
        self._choose_due = choose_due

    def commit(self, call: CommitCall) -> Committed:
        """Swap in a sealed update, and return the rank's part of the receipt.

        ``stall_ms`` is the time on this thread. A device may not have made the swap yet.
        """
        sealed = self._staging.take(call.update_id)
        if call.kept_kv.flushes:
            # checked on all ranks before, but a caller may have continued generation since
            self.require_recomputable()

        def swap_in() -> Swapped:
            return self._live.swap_in(
                sealed.digest,
                sealed.swap,
                base=self._versions.label,
                missing=sealed.missing,
                kv_scale=call.kv_scale,
            )

        committed = self._go_live(
            swap_in,
            sealed.digest,
            call.weight_version,
            call.kept_kv,
            empty_cache=call.torch_empty_cache,
        )
        _name_checkpoints(sealed)
        return committed

    def roll_back(self, call: RollbackCall) -> Committed:
        """Swap the previous version back in. A second rollback undoes the first."""
        if call.expected_version not in (None, self._versions.current):
            raise Conflict(
                f"expected_version is {call.expected_version!r}, but "
                f"{self._versions.current!r} is serving"
            )
        previous = self._live.previous
        reason = self._staging.why_no_rollback()
        # a rank without tensors in the last update has no previous version, and ranks that step
        # together change together
        if is_true_on_any_rank(reason is not None):
            reason = reason or "another rank of this replica has none"
        if reason is not None or previous is None:
            raise Refused(f"there is no previous version to return to: {reason}")
        require_recompute(call.kept_kv, previous.kv_scale, "the rollback")
        assert previous.digest is not None
        return self._go_live(
            lambda: self._live.swap_back(base=self._versions.label),
            previous.digest,
            call.weight_version or previous.version,
            call.kept_kv,
            empty_cache=False,
            rolls_back=True,
        )

    def describe(self) -> WeightsStatus:
        return WeightsStatus(
            weight_version=self._versions.current,
            epoch=self._versions.epoch,
            digest=self._live.digest,
            previous_version=self._live.previous.version if self._live.previous else None,
            layout=self._layout,
        )

    def require_recomputable(self) -> None:
        """Raise ``Conflict`` if some held KV cannot be recomputed."""
        if (why := self._boundary.requests.why_not_recomputed()) is not None:
            raise Conflict(
                f'kv_cache="recompute" (flush_cache=true) is not possible now: {why}; pause with '
                'mode "abort" or "retract", or pass kv_cache="fence" or "keep"'
            )

    def _go_live(
        self,
        swap: Callable[[], Swapped],
        digest: str,
        version: str | None,
        kept: KeptKV,
        *,
        empty_cache: bool,
        rolls_back: bool = False,
    ) -> Committed:
        started = time.perf_counter()
        base = self._versions.current
        retracted = self._retract(kept)
        swapped = swap()
        self._staging.note_commit(rolls_back=rolls_back)
        try:
            self._follow(version, kept, empty_cache=empty_cache)
        except Exception as error:
            raise HalfDone(
                f"the new weights are in place as {self._versions.current!r}, but {error}"
            ) from error
        stall_s = time.perf_counter() - started
        self._metrics.epoch.set(self._versions.epoch)
        logger.info(
            "Committed weights %r as epoch %d: %d bytes.",
            self._versions.current,
            self._versions.epoch,
            swapped.nbytes,
        )
        return Committed(
            weight_version=self._versions.current,
            base_version=base,
            epoch=self._versions.epoch,
            stall_ms=1000 * stall_s,
            held_s=swapped.held_s,
            retracted=len(retracted),
            digest=digest,
        )

    def _retract(self, kept: KeptKV) -> Collection[Req]:
        """Retract the running requests that recompute their KV with the new weights at once."""
        boundary = self._boundary
        if not kept.flushes:
            over = self._ages.over(kept, self._versions.epoch + 1)
            return boundary.refresh(self._choose_due(over)) if over else []
        boundary.drain()
        running = boundary.requests.running()
        boundary.retract()
        boundary.put_first(running)
        return running

    def _follow(self, version: str | None, kept: KeptKV, *, empty_cache: bool) -> None:
        """Update versions, requests, ages and cache after a swap."""
        self._versions.begin_epoch(version)
        self._on_swap()
        # before the flush: no old prefix is reused even if the flush fails
        self._ages.begin(kept, self._versions.epoch)
        if kept.flushes:
            self._boundary.flush(empty_cache=empty_cache)


def _name_checkpoints(sealed: Sealed) -> None:
    """Store the checkpoint's path where SGLang reads the model's path."""
    for runner, source in sealed.checkpoints:
        load_format = source.load_format or "auto"
        runner.update_model_fields(
            runner.model,
            model_path=source.model_path,
            load_format=load_format,
            load_config=LoadConfig(load_format=load_format),
        )
        runner.model_config.model_path = source.model_path


class CommitAnswers:
    """Answers commits and rollbacks. Only the scheduler's thread touches this object.

    On a device the loop only enqueues a swap, in less than a millisecond. The forwards behind the
    swap wait for the copies, and the host learns later for how long. So such a commit is answered
    at the first boundary after the swap's end. If no step is made, the loop is about to sleep, and
    nothing else would wake it: then the loop waits for the swap.
    """

    def __init__(self, answers: AnswerChannel, live: LiveWeights, metrics: Metrics) -> None:
        self._answers = answers
        self._live = live
        self._metrics = metrics
        self._waiting: list[tuple[InflightCall[Committed], Committed, DeviceSwap | None]] = []

    def give(self, call: InflightCall[Committed], committed: Committed) -> None:
        """Answer ``call``, at once or at a later boundary.

        ``committed.stall_ms`` holds the time on the loop, the whole time on a CPU.
        """
        self._waiting.append((call, committed, self._live.last_swap))
        self.give_due()

    def give_due(self, *, wait: bool = False) -> None:
        """Answer finished commits, at each boundary. ``wait``: no step is made now."""
        self._live.free_given_up()
        while self._waiting:
            call, committed, swap = self._waiting[0]
            if swap is not None:
                if wait:
                    swap.wait()
                elif not swap.is_done():
                    return
                committed.stall_ms = max(committed.stall_ms, swap.milliseconds())
            del self._waiting[0]
            self._metrics.commit_stall.observe(committed.stall_ms / 1000)
            logger.info(
                "The commit of epoch %d held steps for %.2f ms.",
                committed.epoch,
                committed.stall_ms,
            )
            self._answers.succeed(call, committed)

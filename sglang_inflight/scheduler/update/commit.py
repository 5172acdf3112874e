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
from collections.abc import Callable

from sglang.srt.configs.load_config import LoadConfig

from sglang_inflight.messages import CommitCall, Committed, InflightCall, KVPolicy, RollbackCall
from sglang_inflight.metrics import Metrics
from sglang_inflight.scheduler.answers import AnswerChannel
from sglang_inflight.scheduler.boundary import Boundary
from sglang_inflight.scheduler.collectives import is_true_on_any_rank
from sglang_inflight.scheduler.update.live_weights import DeviceSwap, LiveWeights, Swapped
from sglang_inflight.scheduler.update.staging import Staging
from sglang_inflight.scheduler.update.update import Sealed
from sglang_inflight.scheduler.versions.prefix_fence import PrefixFence
from sglang_inflight.scheduler.versions.token_versions import Versions
from sglang_inflight.vocabulary.answers import WeightsStatus
from sglang_inflight.vocabulary.bodies import require_recompute
from sglang_inflight.vocabulary.errors import Conflict, HalfDone, Refused

logger = logging.getLogger(__name__)


class Commits:
    """Commits and rollbacks of one rank, on the scheduler's thread."""

    def __init__(
        self,
        boundary: Boundary,
        staging: Staging,
        live: LiveWeights,
        versions: Versions,
        fence: PrefixFence,
        metrics: Metrics,
        layout: str,
        *,
        on_swap: Callable[[], None],
    ) -> None:
        """``layout`` names this rank's layout of the weights, for the status.

        ``on_swap`` is called after a swap, when the version is the new one, and KV the old one.
        """
        self._layout = layout
        self._boundary = boundary
        self._staging = staging
        self._live = live
        self._versions = versions
        self._fence = fence
        self._metrics = metrics
        self._on_swap = on_swap

    def commit(self, call: CommitCall) -> Committed:
        """Swap in a sealed update, and return the rank's part of the receipt.

        ``stall_ms`` is the time on this thread. A device may not have made the swap yet.
        """
        sealed = self._staging.take(call.update_id)
        if call.kv_cache == "recompute":
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
            call.kv_cache,
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
        require_recompute(call.kv_cache, previous.kv_scale, "the rollback")
        assert previous.digest is not None
        return self._go_live(
            lambda: self._live.swap_back(base=self._versions.label),
            previous.digest,
            call.weight_version or previous.version,
            call.kv_cache,
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
        kv_cache: KVPolicy,
        *,
        empty_cache: bool,
        rolls_back: bool = False,
    ) -> Committed:
        started = time.perf_counter()
        base = self._versions.current
        retracted = self._boundary.retract() if kv_cache == "recompute" else 0
        swapped = swap()
        self._staging.note_commit(rolls_back=rolls_back)
        try:
            self._follow(version, kv_cache, empty_cache=empty_cache)
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
            retracted=retracted,
            digest=digest,
        )

    def _follow(self, version: str | None, kv_cache: KVPolicy, *, empty_cache: bool) -> None:
        """Update versions, requests, fence and cache after a swap."""
        self._versions.begin_epoch(version)
        self._on_swap()
        if kv_cache != "keep":
            # before the flush: no old prefix is reused even if the flush fails
            self._fence.raise_to(self._versions.epoch)
        if kv_cache == "recompute":
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

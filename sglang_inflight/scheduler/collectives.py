"""Collectives by which the ranks of a replica agree, because they step together.

All ranks see the same control messages in the same pass of their loops. Their clocks, their
failures and the requests of their attention DP groups may differ. Each function is a collective
over the replica's ranks on the host. All ranks call it in the same pass, on the scheduler's thread.
No other thread uses that group.

``ControlSync`` makes all ranks take in a control call in the same step, where SGLang does not. With
``--enable-dp-attention-local-control-broadcast`` the first rank of each attention DP group receives
control calls on its own socket, and broadcasts them to its group alone. SGLang thus saves a
collective over all ranks in each pass. But two groups may receive a pause or a commit in different
steps. Then one rank would make a forward without the other, or with other weights.

So each rank counts the calls received, and takes in the smallest count of all ranks. A count
identifies calls, because one process sends them to all groups in the same order. The ranks exchange
counts in attention DP's own exchange before each forward, at no extra cost. All ranks have the
result before the next boundary. A pass without that exchange, because a pause holds the loop,
exchanges counts by a collective of its own.

All ranks make the same passes, and the same exchange in each pass: the choice depends only on calls
taken in before.

This module hooks ``Scheduler.process_input_requests`` and ``MLPSyncBatchInfo``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from sglang.srt.managers.io_struct import (
    CheckWeightsReqInput,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
)
from sglang.srt.utils import broadcast_pyobj

from sglang_inflight.hooking import AFTER, AROUND, EXCHANGE, SCHEDULER, hook
from sglang_inflight.messages import Call
from sglang_inflight.sglang_types import get_parallel

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.dp_attn import MLPSyncBatchInfo

T = TypeVar("T")
# Besides our calls: SGLang's pause messages, because we handle them; and its weight checks,
# because they are collectives and may overwrite weights
_TOGETHER: tuple[type, ...] = (
    Call,
    PauseGenerationReqInput,
    ContinueGenerationReqInput,
    CheckWeightsReqInput,
)
# the count of an absent rank, larger than all others
_ALL = 1 << 62


def min_over_ranks(here: int) -> int:
    """Return the smallest of the ranks' values."""
    group = get_parallel().tp_group
    if group.world_size == 1:
        return here
    said = torch.tensor([here])
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(said)


def is_true_on_any_rank(here: bool) -> bool:
    """Return whether ``here`` is true on any rank."""
    return min_over_ranks(int(not here)) == 0


def broadcast_from_first_rank(here: list[T]) -> list[T]:
    """Return the first rank's list. Its items must pickle."""
    group = get_parallel().tp_group
    if group.world_size == 1:
        return here
    said: list[T] = broadcast_pyobj(here, group.rank, group.cpu_group, src=group.ranks[0])
    return said


def broadcast_from_first_rank_of_all(here: list[T]) -> list[T]:
    """Return the list of the first rank of all pipeline stages. Its items must pickle."""
    group = get_parallel().world_group
    said: list[T] = broadcast_pyobj(here, group.rank, group.cpu_group, src=group.ranks[0])
    return said


class ControlSync:
    """Calls of one scheduler that other ranks may not have received yet.

    Only the scheduler's thread touches it. There is one per process, because SGLang's exchange
    object has no reference to the process's one scheduler.
    """

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()
        # numbers of calls since the start
        self._received = 0
        self._taken = 0
        self._received_by_all = 0
        # whether the last pass exchanged counts
        self._has_exchanged = False

    @property
    def is_needed(self) -> bool:
        parallel = get_parallel()
        return parallel.attn_dp_enabled and parallel.enable_dp_attention_local_control_broadcast

    @property
    def is_waiting(self) -> bool:
        """Whether a received call is not taken in yet."""
        return bool(self._waiting)

    @hook(f"{SCHEDULER}.process_input_requests", AROUND, via=lambda _: CONTROL_SYNC)
    def process(self, process: Callable[[list[Any]], None], recv_reqs: list[Any]) -> None:
        process(self._take(recv_reqs))

    def _take(self, requests: list[Any]) -> list[Any]:
        """Return other ``requests``, and the waiting calls received by all ranks.

        Called at a boundary.
        """
        if not self.is_needed:
            return requests
        calls = [each for each in requests if isinstance(each, _TOGETHER)]
        self._waiting.extend(calls)
        self._received += len(calls)
        if not self._has_exchanged:
            self._received_by_all = min_over_ranks(self._received)
        self._has_exchanged = False
        due = [self._waiting.popleft() for _ in range(self._received_by_all - self._taken)]
        self._taken += len(due)
        return [each for each in requests if not isinstance(each, _TOGETHER)] + due

    @hook(f"{EXCHANGE}._get_local_tensor", AFTER, via=lambda _: CONTROL_SYNC)
    def append_count(self, row: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Append this rank's count to ``row``, its row in SGLang's exchange."""
        return self._with(row, self._received)

    @hook(f"{EXCHANGE}._get_fallback_tensor", AFTER, via=lambda _: CONTROL_SYNC)
    def count_for_absent_rank(self, row: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Append a count to ``row``, the row of an absent rank, that delays no other rank."""
        return self._with(row, _ALL)

    def _with(self, row: torch.Tensor, count: int) -> torch.Tensor:
        return torch.cat([row, row.new_tensor([count])]) if self.is_needed else row

    def take_counts(self, exchanged: MLPSyncBatchInfo) -> None:
        if self.is_needed:
            self._received_by_all = int(exchanged.tp0_info_cpu[:, -1].min())
            self._has_exchanged = True


CONTROL_SYNC: ControlSync = ControlSync()


@hook(f"{EXCHANGE}.all_gather", AFTER)
def take_counts(_: None, exchanged: MLPSyncBatchInfo, *args: Any, **kwargs: Any) -> None:
    """Read the counts off ``exchanged``, with a row per attention DP group's first rank."""
    CONTROL_SYNC.take_counts(exchanged)

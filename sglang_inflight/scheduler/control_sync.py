"""Calls of ours that ranks hear of in different steps, and take in in the same one.

With ``--enable-dp-attention-local-control-broadcast`` the first rank of each attention DP group
has control calls from a socket of its own, and hands them to its group alone: SGLang saves the
collective over all ranks in each pass of their loops. A pause or a commit on one group in one
step, and on the next group in another, would leave a rank in a forward that another one does
not make, or with other weights in it.

So each rank counts the calls that it has heard of, and takes in as many as all have. The ranks
tell each other in the exchange that attention DP makes before each forward anyway, where a
number more costs nothing; all have its outcome before the next boundary. Calls reach each group
in the same order, through the one process that hands them out, so a count names them. In a pass
that made no such exchange, because a pause holds the loop, they exchange it by themselves.

The passes of two ranks are the same passes: either exchange is made by all. Whether a pass makes
the one or the other hangs on calls that were taken in, and on nothing else.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.io_struct import (
    CheckWeightsReqInput,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
)

from sglang_inflight.messages import CALLS
from sglang_inflight.scheduler.collectives import smallest
from sglang_inflight.sglang_types.runtime_context import get_parallel

if TYPE_CHECKING:
    from sglang_inflight.scheduler.sglang_types.dp_attn import MLPSyncBatchInfo

# SGLang's pauses are ours too, whoever sends them; and its checks of weights, which may overwrite
# them, are collectives
_TOGETHER = (
    *CALLS,
    PauseGenerationReqInput,
    ContinueGenerationReqInput,
    CheckWeightsReqInput,
)
# of a rank that is not there, which holds nobody back
_ALL = 1 << 62


class ControlSync:
    """The calls of one scheduler that others may not have heard of yet.

    Only the scheduler's thread touches it. It belongs to the process, which has one scheduler,
    because the object that SGLang makes for the exchange knows of none.
    """

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()
        # counts of calls, since the start
        self._heard = 0
        self._taken = 0
        self._heard_by_all = 0
        # whether the last pass exchanged that
        self._has_exchanged = False

    @property
    def is_needed(self) -> bool:
        parallel = get_parallel()
        return parallel.attn_dp_enabled and parallel.enable_dp_attention_local_control_broadcast

    @property
    def is_waiting(self) -> bool:
        """Is there a call that a next pass is to take in?"""
        return bool(self._waiting)

    def take(self, requests: list[Any]) -> list[Any]:
        """At a boundary: those of ``requests``, and of calls that waited, which are due now."""
        if not self.is_needed:
            return requests
        calls = [each for each in requests if isinstance(each, _TOGETHER)]
        self._waiting.extend(calls)
        self._heard += len(calls)
        if not self._has_exchanged:
            self._heard_by_all = smallest(self._heard)
        self._has_exchanged = False
        due = [self._waiting.popleft() for _ in range(self._heard_by_all - self._taken)]
        self._taken += len(due)
        return [each for each in requests if not isinstance(each, _TOGETHER)] + due

    def tell(self, row: torch.Tensor) -> torch.Tensor:
        """``row`` is what this rank says of itself in SGLang's exchange."""
        return self._with(row, self._heard)

    def count_for_absent_rank(self, row: torch.Tensor) -> torch.Tensor:
        """``row`` is what is said of a rank that is not there."""
        return self._with(row, _ALL)

    def _with(self, row: torch.Tensor, count: int) -> torch.Tensor:
        return torch.cat([row, row.new_tensor([count])]) if self.is_needed else row

    def hear(self, exchanged: MLPSyncBatchInfo) -> None:
        """``exchanged`` has a row of each attention DP group's first rank."""
        if self.is_needed:
            self._heard_by_all = int(exchanged.tp0_info_cpu[:, -1].min())
            self._has_exchanged = True


CONTROL_SYNC = ControlSync()

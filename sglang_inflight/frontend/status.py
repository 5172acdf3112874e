"""What the ranks say of themselves, as one answer."""

from __future__ import annotations

from typing import Any

from sglang_inflight.messages import Described
from sglang_inflight.status import RankStatus, Status


def write_status(ranks: list[Described], *, sglangs_pause: bool) -> Status:
    """The replicas differ for a moment only: the first rank stands for all, but for
    ``paused``, which is true where any rank is. Of SGLang's own pause no rank knows."""
    pause: dict[str, Any] = {"paused": any(rank.pause.paused for rank in ranks)}
    if sglangs_pause:
        pause = {"paused": True, "mode": "abort"}
    return Status(
        **_side_by_side(ranks[0]) | pause,
        role=ranks[0].role,
        ranks=tuple(
            RankStatus(
                **_side_by_side(rank),
                dp_rank=rank.dp_rank,
                tp_rank=rank.tp_rank,
                pp_rank=rank.pp_rank,
            )
            for rank in ranks
        ),
    )


def _side_by_side(rank: Described) -> dict[str, Any]:
    """The fields of ``State``."""
    return {**rank.pause, **rank.weights, "staging": rank.staging, "memory": rank.memory}

"""Merge the ranks' statuses into one answer."""

from __future__ import annotations

from typing import Any

from sglang_inflight.messages import Described
from sglang_inflight.vocabulary.answers import Capabilities, RankStatus, Status


def write_status(ranks: list[Described], *, sglangs_pause: bool) -> Status:
    """Return the first rank's state, and each rank's. Replicas differ only for moments.

    ``paused`` is true if any rank is paused. Ranks know nothing of SGLang's own pause.
    """
    pause: dict[str, Any] = {"paused": any(rank.pause.paused for rank in ranks)}
    if sglangs_pause:
        pause = {"paused": True, "mode": "abort"}
    return Status(
        **_side_by_side(ranks[0]) | pause,
        role=ranks[0].role,
        capabilities=_merge([rank.capabilities for rank in ranks]),
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
    """Return the fields of ``State``."""
    return {**rank.pause, **rank.weights, "staging": rank.staging, "memory": rank.memory}


def _merge(tables: list[Capabilities]) -> Capabilities:
    """Return the first reason of any rank for each row. Stages have different models."""
    return Capabilities(
        **{
            row: next((table[row] for table in tables if table[row] is not None), None)
            for row in Capabilities.__struct_fields__
        }
    )

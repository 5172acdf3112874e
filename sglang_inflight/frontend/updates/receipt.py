"""What a caller gets for an update: proof of what is served now, rank by rank."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from sglang_inflight.errors import InflightError
from sglang_inflight.messages import Committed

Receipt = dict[str, Any]


def write_receipt(
    committed: list[Committed], *, staged_s: float, nbytes: int, tensors: int, message: str
) -> Receipt:
    """``stall_ms`` is the longest that any rank's loop was held by the commit."""
    first = committed[0]
    return {
        "success": True,
        "message": message,
        "weight_version": first.weight_version,
        "base_version": first.base_version,
        "epoch": first.epoch,
        "staged_s": staged_s,
        "stall_ms": max(rank.stall_ms for rank in committed),
        "bytes": nbytes,
        "tensors": tensors,
        "retracted": sum(rank.retracted for rank in committed),
        "ranks": [
            {**rank.rank, "success": True, "message": "", "digest": rank.digest}
            for rank in committed
        ],
    }


async def settle(doing: Awaitable[Receipt | None]) -> tuple[bool, str]:
    """What upstream's methods return: whether it was done, and a message or the refusal's."""
    try:
        receipt = await doing
    except InflightError as error:
        return False, str(error)
    return True, receipt["message"] if receipt else "Success"

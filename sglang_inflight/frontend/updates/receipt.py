"""Write an update's receipt: proof of the served weights, rank by rank."""

from __future__ import annotations

from sglang_inflight.frontend.updates.open_update import OpenUpdate
from sglang_inflight.messages import Committed
from sglang_inflight.vocabulary.answers import RankReceipt, Receipt


def write_receipt(committed: list[Committed], update: OpenUpdate | None) -> Receipt:
    """Write the receipt of a commit. ``update`` is None for a rollback."""
    message = "Rolled the weights back."
    if update is not None:
        message = "Succeeded to update model weights."
        if update.weight_version is not None:
            message += f" Weight version updated to {update.weight_version}."
    first = committed[0]
    return Receipt(
        message=message,
        weight_version=first.weight_version,
        base_version=first.base_version,
        epoch=first.epoch,
        staged_s=update.staged_s if update is not None else 0.0,
        stall_ms=max(rank.stall_ms for rank in committed),
        bytes=update.bytes if update is not None else 0,
        tensors=update.tensors if update is not None else 0,
        retracted=sum(rank.retracted for rank in committed),
        staged_as=update.staged_as if update is not None else None,
        ranks=tuple(
            RankReceipt(
                dp_rank=rank.dp_rank, tp_rank=rank.tp_rank, pp_rank=rank.pp_rank, digest=rank.digest
            )
            for rank in committed
        ),
    )

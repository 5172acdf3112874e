"""Messages between the front end and the ranks about the parts of tensors."""

from __future__ import annotations

from sglang_inflight.messages import Call, RankAnswer


class DescribedParts(RankAnswer, kw_only=True):
    """A rank uses these parts of the checkpoint's tensors (``vocabulary/shards.py``)."""

    # the rank's place in the order of all ranks
    index: int
    digest: str
    # None: the caller knows the digest
    lines: bytes | None


class DescribePartsCall(Call, kw_only=True):
    """Say what the rank uses of each tensor, but not the lines of a ``known`` digest."""

    answer = DescribedParts

    known: list[str]

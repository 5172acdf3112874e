"""Checksums of the served weights, in vLLM's form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import CheckWeightsReqInput

from sglang_inflight.vocabulary.errors import RankFailed

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager


async def read_checksums(tokenizer_manager: TokenizerManager) -> dict[str, str]:
    """Return checksums by ``dp….pp….tp….<tensor name>``. Blocks the schedulers' loops meanwhile.

    Raises ``RankFailed`` if a rank cannot read its weights.
    """
    success, message, ranks, _ = await tokenizer_manager.check_weights(
        CheckWeightsReqInput(action="checksum", selector="target")
    )
    if not success or ranks is None:
        raise RankFailed(f"the weights could not be read: {message}")
    return {
        f"{_prefix(rank['parallelism_info'][0])}.{name}": checksum
        for rank in ranks
        for name, checksum in rank["checksums"].items()
    }


def _prefix(place: dict[str, Any]) -> str:
    return f"dp{place['dp_rank']}.pp{place['pp_rank']}.tp{place['tp_rank']}"


def mismatches(ours: dict[str, str], baseline: dict[str, str]) -> list[str]:
    """Return tensors with different checksums, or missing in one of the two."""
    return sorted(
        name for name in ours.keys() | baseline.keys() if ours.get(name) != baseline.get(name)
    )

"""Counts of adapters' requests in this process, when requests move to another adapter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sglang.srt.utils import ConcurrentCounter

if TYPE_CHECKING:
    from sglang_inflight.sglang_types import TokenizerManager


async def count_as_moved(
    tokenizer_manager: TokenizerManager, rids: Iterable[str], from_id: str, to_id: str
) -> None:
    """Move this process's counts of ``rids`` to the new adapter; skip ended requests."""
    counters = tokenizer_manager.lora_registry._counters
    for rid in rids:
        state = tokenizer_manager.rid_to_state.get(rid)
        if state is not None and not state.lora_released and state.obj.lora_id == from_id:
            state.obj.lora_id = to_id
            # a worker has no counter yet if it never had a request of this adapter
            await counters.setdefault(to_id, ConcurrentCounter()).increment()
            await counters[from_id].decrement()

"""Requests that go on with another adapter, as the process counts them that took them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sglang.srt.utils import ConcurrentCounter

if TYPE_CHECKING:
    from sglang_inflight.frontend.sglang_types.tokenizer_manager import TokenizerManager


async def count_as_moved(
    tokenizer_manager: TokenizerManager, rids: Iterable[str], from_id: str, to_id: str
) -> None:
    """Those of ``rids`` that this process took. What has ended by now was counted to its end."""
    counters = tokenizer_manager.lora_registry._counters
    for rid in rids:
        state = tokenizer_manager.rid_to_state.get(rid)
        if state is not None and not state.lora_released and state.obj.lora_id == from_id:
            state.obj.lora_id = to_id
            # a worker has none where the adapter lost its name before a request of its own had it
            await counters.setdefault(to_id, ConcurrentCounter()).increment()
            await counters[from_id].decrement()

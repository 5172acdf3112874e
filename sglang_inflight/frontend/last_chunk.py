"""Empty the last chunk of an aborted stream with ``--incremental-streaming-output``.

SGLang repeats the last token, and the whole text, in the last chunk. Earlier chunks already hold
every token known to the front end. Runs on the manager's event loop, as all chunks do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.managers.tokenizer_manager import _slice_streaming_output_meta_info

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BaseReq

    from sglang_inflight.sglang_types import TokenizerManager


def end_with_an_empty_chunk(
    handle: Callable[..., None], manager: TokenizerManager, recv_obj: BaseReq
) -> None:
    state = manager.rid_to_state.get(recv_obj.rid or "")
    handle(manager, recv_obj)
    if state is None or not manager.incremental_streaming_output:
        return
    if getattr(state.obj, "stream", False) and state.finished:
        chunk = state.out_list[-1]
        chunk |= {"text": "", "output_ids": []}
        _slice_streaming_output_meta_info(chunk["meta_info"], state.last_output_offset)

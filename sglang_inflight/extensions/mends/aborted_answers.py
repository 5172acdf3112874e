"""Answers of aborted requests: no repeated tokens in a stream, an error for an embedding.

This module hooks ``TokenizerManager``.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import EmbeddingReqInput
from sglang.srt.managers.tokenizer_manager import _slice_streaming_output_meta_info

from sglang_inflight.hooking import AROUND, BEFORE, TOKENIZER_MANAGER, hook, with_us

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BaseReq

    from sglang_inflight.sglang_types import TokenizerManager


@hook(f"{TOKENIZER_MANAGER}._handle_abort_finish_reason", BEFORE, when=with_us)
def refuse_without_embedding(
    tm: TokenizerManager, out: dict[str, Any], state: Any, is_stream: bool
) -> None:
    """Turn an aborted embedding request into an error, before SGLang checks its finish reason.

    A text cut short is still an answer. An aborted embedding request has no embedding, and
    SGLang's routes fail when they look for it.
    """
    reason = out["meta_info"]["finish_reason"]
    is_aborted = reason.get("type") == "abort" and reason.get("status_code") is None
    if is_aborted and isinstance(state.obj, EmbeddingReqInput) and "embedding" not in out:
        reason["status_code"] = HTTPStatus.SERVICE_UNAVAILABLE
        reason["message"] = "the request was aborted before its embedding was computed; retry"


@hook(f"{TOKENIZER_MANAGER}._handle_abort_req", AROUND, when=with_us)
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

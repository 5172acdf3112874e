"""Beam searches: a group of one request and further rows without a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sglang_inflight.sglang_types.describes import describes

if TYPE_CHECKING:
    import torch


@describes("sglang.srt.beam_search.beam_group.BeamGroup")
class BeamGroup(Protocol):
    beam_width: int
    length_penalty: float
    max_new_tokens: int
    num_return: int
    stop_token_ids: torch.Tensor
    # the group's request
    leader: Any

"""The sender of requests' outputs."""

from __future__ import annotations

from typing import Any, Protocol

from sglang_inflight.scheduler.sglang_types.req import Req
from sglang_inflight.sglang_types.describes import describes


@describes("sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer")
class SchedulerOutputStreamer(Protocol):
    has_additional_customized_info: bool
    # false for an embedding model
    is_generation: bool

    def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[Any]]: ...
    def stream_output(self, reqs: list[Req], return_logprob: bool) -> None: ...

"""Outputs that say which weights computed a request's KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_inflight.messages import KV_VERSIONS

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    from sglang_inflight.scheduler.controller import Controller


def extend(base: type[SchedulerOutputStreamer]) -> type[SchedulerOutputStreamer]:
    """``base``, with the KV's spans in the last output of each request."""

    class OutputStreamer(base):
        has_additional_customized_info = True
        inflight: Controller  # set when it is made, before the first output

        def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[Any]]:
            info: dict[str, list[Any]] = super().build_additional_customized_info(reqs)
            self.inflight.before_output(reqs)
            spans = [getattr(req, "inflight_kv_versions", None) for req in reqs]
            if any(each is not None for each in spans):
                info = {**info, KV_VERSIONS: spans}
            return info

    return OutputStreamer

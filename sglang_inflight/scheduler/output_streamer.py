"""Adds the versions of a request's KV to its last output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_inflight.messages import KV_VERSIONS
from sglang_inflight.scheduler.versions.request_record import record_of

if TYPE_CHECKING:
    from sglang_inflight.scheduler.controller import Controller
    from sglang_inflight.scheduler.sglang_types.req import Req
    from sglang_inflight.scheduler.sglang_types.scheduler import SchedulerOutputStreamer


def extend(base: type[SchedulerOutputStreamer]) -> type[SchedulerOutputStreamer]:
    """Return a subclass of ``base`` with ``kv_versions`` in each request's last output."""

    class OutputStreamer(base):  # type: ignore[valid-type, misc]
        has_additional_customized_info = True
        inflight: Controller  # set by ``create_controller``, before the first output

        def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[Any]]:
            info: dict[str, list[Any]] = super().build_additional_customized_info(reqs)
            self.inflight.before_output(reqs)
            spans = [record_of(req).kv_versions for req in reqs]
            if any(each is not None for each in spans):
                info = {**info, KV_VERSIONS: spans}
            return info

    return OutputStreamer

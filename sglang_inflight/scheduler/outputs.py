"""Hooks on what a scheduler sends: our fields in the last output of a request, and its ``rid``.

SGLang's methods: ``Scheduler.get_output_streamer_class`` and ``SenderWrapper.send_output``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import BaseReq

from sglang_inflight.hooking import AROUND, BEFORE, SCHEDULER, SENDER, hook
from sglang_inflight.joints import Joint
from sglang_inflight.messages import KV_VERSIONS
from sglang_inflight.scheduler.controller import Controller
from sglang_inflight.scheduler.requests import record_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    from sglang_inflight.sglang_types import Scheduler

# completes requests that have ended, before their last outputs are built
LAST_OUTPUTS: Joint[Callable[[Controller, list[Req]], None]] = Joint("last outputs")
# adds fields to outputs, some of which are last ones: a value for each request, None without one
OUTPUTS: Joint[Callable[[Controller, list[Req]], dict[str, list[Any]]]] = Joint("outputs")


@hook(f"{SENDER}.send_output", BEFORE)
def copy_request_id(
    sender: SenderWrapper, output: Any, recv_obj: object = None, *args: Any, **kwargs: Any
) -> None:
    """Copy the request's id to the answer, so that no other caller takes the answer."""
    if isinstance(output, BaseReq) and isinstance(recv_obj, BaseReq) and output.rid is None:
        output.rid = recv_obj.rid


@hook(f"{SCHEDULER}.get_output_streamer_class", AROUND)
def extend_output_streamer(get_class: Callable[..., type], scheduler: Scheduler) -> type:
    return _extend(get_class(scheduler))


def _extend(base: type[SchedulerOutputStreamer]) -> type[SchedulerOutputStreamer]:
    """Return a subclass of ``base`` with our fields in each request's last output."""

    class OutputStreamer(base):  # type: ignore[valid-type, misc]
        has_additional_customized_info = True
        inflight: Controller  # set by ``create_controller``, before the first output

        def stream_output(self, reqs: list[Req], *args: Any, **kwargs: Any) -> None:
            if ended := [req for req in reqs if req.finished() and not req.finished_output]:
                for complete in LAST_OUTPUTS:
                    complete(self.inflight, ended)
            super().stream_output(reqs, *args, **kwargs)

        def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[Any]]:
            info: dict[str, list[Any]] = super().build_additional_customized_info(reqs)
            # only ended requests have such fields, and a step seldom ends one
            if not any(req.finished() for req in reqs):
                return info
            added: dict[str, list[Any]] = {
                KV_VERSIONS: [record_of(req).kv_versions for req in reqs]
            }
            for fields in OUTPUTS:
                added |= fields(self.inflight, reqs)
            return info | {
                name: values for name, values in added.items() if any(v is not None for v in values)
            }

    return OutputStreamer

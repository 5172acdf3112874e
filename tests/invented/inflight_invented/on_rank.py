from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_inflight.hooking import BEFORE, SCHEDULER, hook
from sglang_inflight.messages import InflightCall
from sglang_inflight.scheduler.controller import CALLS, ENTRIES, PARTS, Controller, Handler

from .messages import CountCall, Counted

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class Counts:
    queued = 0
    launched = 0

    @hook(f"{SCHEDULER}.run_batch", BEFORE, order=7, via=lambda s: s.inflight.part(Counts))
    def launch(self, *args: Any, **kwargs: Any) -> None:
        self.launched += 1


@PARTS.join()
def make_counts(_: Controller) -> Counts:
    return Counts()


@ENTRIES.join()
def enter(controller: Controller, _: Req) -> None:
    controller.part(Counts).queued += 1


@CALLS.join()
def handlers(controller: Controller) -> dict[type[InflightCall[Any]], Handler]:
    def count(call: CountCall) -> None:
        counts = controller.part(Counts)
        controller.answers.succeed(call, Counted(queued=counts.queued, launched=counts.launched))

    return {CountCall: count}

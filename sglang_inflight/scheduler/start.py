"""Creates a scheduler's controller, after ``Scheduler.__init__``."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from sglang_inflight.hooking import AFTER, SCHEDULER, hook
from sglang_inflight.scheduler.controller import Controller
from sglang_inflight.scheduler.host_tier import engine_of
from sglang_inflight.unsupported import refuse_what_was_not_asked

if TYPE_CHECKING:
    from sglang.srt.server_args import PortArgs

    from sglang_inflight.scheduler.patched_types import (
        PatchedScheduler,
        PatchedSender,
        PatchedTransferEngine,
    )
    from sglang_inflight.sglang_types import ServerArgs


@hook(f"{SCHEDULER}.__init__", AFTER)
def create_controller(
    _: None, scheduler: PatchedScheduler, server_args: ServerArgs, port_args: PortArgs
) -> None:
    refuse_what_was_not_asked(server_args)
    controller = scheduler.inflight = Controller(scheduler, port_args)
    scheduler.output_streamer.inflight = controller
    scheduler.req_to_token_pool.inflight = controller
    cast("PatchedSender", scheduler.ipc_channels.send_to_tokenizer).inflight = controller
    if (engine := engine_of(scheduler.tree_cache)) is not None:
        cast("PatchedTransferEngine", engine).inflight = controller

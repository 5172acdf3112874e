"""A scheduler's sockets."""

from __future__ import annotations

from typing import Any, Protocol

from sglang_inflight.sglang_types.describes import describes


@describes("sglang.srt.managers.scheduler_components.output_sender.SenderWrapper")
class SenderWrapper(Protocol):
    # a zmq.Socket; None on all ranks but a replica's first
    socket: Any | None

    def send_output(self, output: Any, recv_obj: object | None = None) -> None: ...


@describes("sglang.srt.managers.scheduler_components.ipc_channels.SchedulerIpcChannels")
class SchedulerIpcChannels(Protocol):
    # a zmq.Socket, or the scripted runtime's substitute
    recv_from_tokenizer: Any
    recv_from_rpc: Any | None
    send_to_tokenizer: SenderWrapper

"""Receives shared buffers by checkpoint-engine's protocol.

The protocol is MoonshotAI/checkpoint-engine's (``checkpoint_engine/worker.py``, 0.4). The worker
is the REP side. It receives a shared buffer's handle, and then lists of the tensors in the buffer.
Each list is acknowledged when its tensors are loaded. None asks for the buffer's release, and a
second None ends the update. checkpoint-engine's own worker needs CUDA and blocks for ever, so this
module speaks the protocol itself, with a tensors-only unpickler and a time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import zmq
from sglang.srt.platforms import current_platform

from sglang_inflight.messages import IPCSource
from sglang_inflight.scheduler.answers import zmq_context
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.batches import Batches, Packed, Weights
from sglang_inflight.scheduler.update.sources.unpickling import unpickle
from sglang_inflight.scheduler.update.worker import finish
from sglang_inflight.vocabulary.errors import Refused, describe

POLL_MS = 100


def receive_ipc(
    source: IPCSource, device: torch.device, check: Callable[[], None], rate_limit: RateLimit
) -> Batches:
    """Yield the tensors in the shared buffer, one batch for each filling by the trainer.

    Load a batch before asking for the next one: the request acknowledges the batch, and the trainer
    fills the buffer again. ``check`` raises when it is time to give up. Raise ``Refused`` if the
    trainer ends, or closes its socket, before the last message.
    """
    key = _device_key(device)
    if key not in source.zmq_handles:
        known = ", ".join(source.zmq_handles) or "none"
        raise Refused(f"zmq_handles has no entry for this rank's device {key!r} (there is {known})")
    with zmq_context().socket(zmq.REP) as socket, _Trainer(socket, check) as trainer:
        socket.linger = 1000
        try:
            socket.connect(source.zmq_handles[key])
        except zmq.ZMQError as error:
            raise Refused(f"zmq_handles: {source.zmq_handles[key]!r}: {error}") from error
        yield from _converse(trainer, device, rate_limit)


class _Trainer:
    """The REP socket to a trainer, and a monitor of the trainer's disconnect.

    Only the thread that makes this object touches it. ZeroMQ puts a message into the socket before
    it reports a later disconnect. So a message sent before the trainer left is still received.
    """

    def __init__(self, socket: zmq.Socket[bytes], check: Callable[[], None]) -> None:
        """Create before ``socket`` connects, or a disconnect could be missed."""
        self._socket = socket
        self._give_up = check
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def check(self) -> None:
        """Raise when it is time to give up, or when the trainer has left."""
        self._give_up()
        if self._has_left():
            raise _left()

    def receive(self) -> bytes:
        while not self._socket.poll(POLL_MS):
            self._give_up()
            if self._has_left() and not self._socket.poll(0):
                raise _left()
        return self._socket.recv()

    def _has_left(self) -> bool:
        # the event is never read, so it stays
        return bool(self._monitor.poll(0))

    def acknowledge(self, device: torch.device) -> None:
        if device.type != "cpu":
            torch.get_device_module(device).current_stream().synchronize()
        self._socket.send(b"")

    def send_failure(self, device: torch.device) -> None:
        """Answer a waiting trainer with text: it reads text as an error. It may be gone.

        The trainer may then write to its buffer, so the copies from there come first.
        """
        if device.type != "cpu":
            finish(torch.get_device_module(device).current_stream())
        with suppress(zmq.ZMQError):
            self._socket.send_string("the update was refused", zmq.NOBLOCK)

    def __enter__(self) -> _Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)


def _left() -> Refused:
    return Refused("the checkpoint engine closed its socket before its last message")


def _converse(trainer: _Trainer, device: torch.device, rate_limit: RateLimit) -> Batches:
    rest = partial(rate_limit.spend, 0)
    finished = False
    try:
        handle = trainer.receive()
        # another process owns the memory, and may be stopped or gone
        with AbandonableThread(trainer.check, device) as thread:
            buffer: torch.Tensor | None = thread.do(lambda: _rebuild(handle, device))
        trainer.acknowledge(device)
        while (listing := _unpickle(trainer.receive(), rest)) is not None:
            assert buffer is not None
            yield _extract(listing, buffer)
            trainer.acknowledge(device)
        buffer = None
        trainer.acknowledge(device)
        trainer.receive()
        finished = True
        trainer.acknowledge(device)
    finally:
        if not finished:
            trainer.send_failure(device)


def _device_key(device: torch.device) -> str:
    return f"GPU-{current_platform.get_device_uuid(device.index or 0)}"


def _unpickle(message: bytes, rest: Callable[[], None] = lambda: None) -> Any:
    try:
        return unpickle(message, rest)
    except Exception as error:
        raise Refused(
            f"the checkpoint engine's message cannot be unpickled: {describe(error)}"
        ) from error


def _rebuild(handle: bytes, device: torch.device) -> torch.Tensor:
    unpickled = _unpickle(handle)
    try:
        rebuild, arguments = unpickled
        if device.type != "cpu":
            # the two processes may number the devices differently
            arguments = (*arguments[:6], device.index, *arguments[7:])
        buffer = rebuild(*arguments)
    except Exception as error:
        raise Refused(
            f"the checkpoint engine's buffer cannot be opened: {describe(error)}"
        ) from error
    if not isinstance(buffer, torch.Tensor) or buffer.dtype != torch.uint8:
        raise Refused("the checkpoint engine's buffer must be a tensor of uint8")
    return buffer


def _extract(listing: Any, buffer: torch.Tensor) -> Weights:
    try:
        packed = Packed(buffer)
        for item in listing:
            shape, dtype, offset = torch.Size(item["shape"]), item["dtype"], item["offset"]
            end = offset + dtype.itemsize * shape.numel()
            yield item["name"], packed.view(offset, end, dtype, shape)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Refused(f"the checkpoint engine's listing is malformed: {error!r}") from error

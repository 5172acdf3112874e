"""Receives shared buffers by checkpoint-engine's protocol.

The protocol is MoonshotAI/checkpoint-engine's (``checkpoint_engine/worker.py``, 0.4). The worker
is the REP side. It receives a shared buffer's handle, and then lists of the tensors in the buffer.
Each list is acknowledged when its tensors are loaded. None asks for the buffer's release, and a
second None ends the update. checkpoint-engine's own worker needs CUDA and blocks for ever, so this
module speaks the protocol itself, with a tensors-only unpickler and a time limit.
"""

from __future__ import annotations

import hashlib
import operator
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
from sglang_inflight.scheduler.update.sources.batches import Batches, Weights
from sglang_inflight.scheduler.update.sources.stretch import Stretch, Take, rest_of, take_none
from sglang_inflight.scheduler.update.sources.unpickling import unpickle
from sglang_inflight.scheduler.update.worker import finish
from sglang_inflight.vocabulary.errors import Refused, describe

POLL_MS = 100
# tensors of a list between two looks at the pace
_ITEMS = 64


class Listings:
    """Contents of the shared buffer at each filling: the stretches, with their first bytes.

    A trainer sends the same lists in each update. So those of the last update are kept, by the
    SHA-256 of their messages, and not read again. The staging thread owns them.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, list[tuple[int, Stretch]]] = {}
        self._used: dict[bytes, list[tuple[int, Stretch]]] = {}

    def begin(self) -> None:
        """Begin an update."""
        self._used = {}

    def end(self) -> None:
        """Keep what the update has used, and nothing else."""
        self._kept = self._used

    def read(self, message: bytes, rest: Callable[[], None]) -> list[tuple[int, Stretch]] | None:
        """Return what ``message`` lists, or None if it is the last one."""
        key = hashlib.sha256(message).digest()
        if (found := self._kept.get(key)) is None:
            if (listing := _unpickle(message, rest)) is None:
                return None
            found = _stretches_of(listing, rest)
        self._used[key] = found
        return found


def receive_ipc(
    source: IPCSource,
    device: torch.device,
    check: Callable[[], None],
    rate_limit: RateLimit,
    take: Take = take_none,
    listings: Listings | None = None,
) -> Batches:
    """Yield the tensors in the shared buffer, one batch for each filling by the trainer.

    ``take`` gets the stretches of a filling first. ``listings``: those of earlier updates.

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
        yield from _converse(trainer, device, rate_limit, take, listings or Listings())


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


def _converse(
    trainer: _Trainer,
    device: torch.device,
    rate_limit: RateLimit,
    take: Take,
    listings: Listings,
) -> Batches:
    rest = partial(rate_limit.spend, 0)
    finished = False
    listings.begin()
    try:
        handle = trainer.receive()
        # another process owns the memory, and may be stopped or gone
        with AbandonableThread(trainer.check, device) as thread:
            buffer: torch.Tensor | None = thread.do(lambda: _rebuild(handle, device))
        trainer.acknowledge(device)
        while (listed := listings.read(trainer.receive(), rest)) is not None:
            assert buffer is not None
            yield _extract(listed, buffer, take)
            trainer.acknowledge(device)
        listings.end()
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


def _stretches_of(listing: Any, rest: Callable[[], None]) -> list[tuple[int, Stretch]]:
    found: list[tuple[int, Stretch]] = []
    try:
        for at, item in enumerate(listing):
            shape, dtype, offset = torch.Size(item["shape"]), item["dtype"], item["offset"]
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"dtype is a {type(dtype).__name__}")
            size, start = dtype.itemsize, operator.index(offset)
            if start < 0 or start % size or any(length < 0 for length in shape):
                raise RuntimeError(f"{[*shape]} of {dtype} at byte {start}")
            nbytes = size * shape.numel()
            gap = start - (found[-1][0] + found[-1][1].nbytes) if found else -1
            # a tensor begins at an element of its stretch, too
            if (
                gap < 0
                or not found[-1][1].has_room_for(gap + nbytes)
                or (start - found[-1][0]) % size
            ):
                found.append((start, Stretch.begin()))
                gap = 0
            found[-1][1].add(item["name"], dtype, tuple(shape), nbytes, gap=gap)
            if not at % _ITEMS:
                rest()
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise _malformed(error) from error
    return found


def _extract(listed: list[tuple[int, Stretch]], buffer: torch.Tensor, take: Take) -> Weights:
    for start, stretch in listed:
        row = buffer[start : start + stretch.nbytes]
        if len(row) != stretch.nbytes:
            raise _malformed(f"{stretch.names[-1]!r} ends beyond the buffer")
        yield from rest_of(stretch, row, take)


def _malformed(why: object) -> Refused:
    return Refused(f"the checkpoint engine's listing is malformed: {why!r}")

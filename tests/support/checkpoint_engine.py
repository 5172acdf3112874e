"""The sending side of checkpoint-engine's protocol, on the CPU or the glass card.

As in ``checkpoint_engine/ps.py`` (0.4): a REQ socket sends a handle to a shared buffer, then lists
of the buffer's tensors, then None twice. The worker answers each message with nothing, or with an
error's text.
"""

from __future__ import annotations

import contextlib
import platform
import tempfile
import threading
import uuid
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
import zmq
from torch.multiprocessing.reductions import reduce_tensor

BUFFER_BYTES = 256 << 10
PATIENCE_MS = 60_000
HAS_CARD = hasattr(torch, "glass")
# the name of a rank's device in zmq_handles
DEVICE = "GPU-glass-0" if HAS_CARD else f"GPU-{platform.machine()}"

# any process can open such a handle; the default needs a common parent
torch.multiprocessing.set_sharing_strategy("file_system")


class CheckpointEngine:
    """A thread that sends ``weights`` in as many buffers as needed."""

    def __init__(self, weights: dict[str, torch.Tensor], socket: zmq.Socket[bytes]) -> None:
        self._weights = weights
        self._socket = socket
        # the worker's error, None without one
        self.error: str | None = None
        self.finished = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._hand_over()
        except Exception as error:
            self.error = repr(error)
            raise
        finally:
            # a rank waiting for the next message learns that none comes
            self._socket.close()

    def _hand_over(self) -> None:
        buffer, handle = _shared_buffer()
        messages = [handle, *_fill(buffer, self._weights), None, None]
        for message in messages:
            # made just before it is sent, because making a listing refills the buffer
            message = message() if callable(message) else message
            self._socket.send(bytes(ForkingPickler.dumps(message)))
            if not self._socket.poll(PATIENCE_MS):
                self.error = "no answer"
            else:
                self.error = self._socket.recv().decode() or None
            if self.error is not None:
                return
        self.finished = True


def _shared_buffer() -> tuple[torch.Tensor, Any]:
    """Return a buffer, on the glass card where that is there, and its handle."""
    if not HAS_CARD:
        buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8).share_memory_()
        return buffer, reduce_tensor(buffer)
    from harness.glass import sharing

    buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="glass")
    return buffer, sharing.reduce_tensor(buffer)


def _fill(buffer: torch.Tensor, weights: dict[str, torch.Tensor]) -> list[Any]:
    """Return a function for each buffer, to fill it and list its tensors."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    room = BUFFER_BYTES
    for name, tensor in weights.items():
        if tensor.nbytes > room:
            parts.append({})
            room = BUFFER_BYTES
        parts[-1][name] = tensor
        room -= tensor.nbytes

    def fill(part: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
        listing, offset = [], 0
        for name, tensor in part.items():
            raw = tensor.contiguous().view(-1).view(torch.uint8)
            buffer[offset : offset + raw.numel()] = raw
            item = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": offset}
            listing.append(item)
            offset += raw.numel()
        if HAS_CARD:
            # a listing is sent when its buffer is full
            torch.accelerator.synchronize()
        return listing

    return [lambda part=part: fill(part) for part in parts]


@contextlib.contextmanager
def checkpoint_engine(
    weights: dict[str, torch.Tensor],
) -> Iterator[tuple[CheckpointEngine, dict[str, str]]]:
    """Run an engine, and yield it with the ``zmq_handles`` of a body."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        address = f"ipc://{Path(folder) / uuid.uuid4().hex}"
        with context.socket(zmq.REQ) as socket:
            socket.linger = 0
            socket.bind(address)
            engine = CheckpointEngine(weights, socket)
            engine.start()
            yield engine, {DEVICE: address}
            engine.join()


@contextlib.contextmanager
def leaves_once_met() -> Iterator[dict[str, str]]:
    """Yield the ``zmq_handles`` of a trainer that closes its socket once a rank has connected."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        address = f"ipc://{Path(folder) / 'trainer'}"
        socket = context.socket(zmq.REQ)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.bind(address)

        def leave() -> None:
            met = monitor.poll(PATIENCE_MS)
            socket.disable_monitor()
            monitor.close()
            socket.close()
            assert met, "no rank connected"

        thread = threading.Thread(target=leave, daemon=True)
        thread.start()
        yield {DEVICE: address}
        thread.join()

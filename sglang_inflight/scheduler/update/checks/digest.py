"""A checksum of served weights, to compare ranks and runs."""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from sglang_inflight.tensor_digest import Digest, HostReader, TensorDigest
from sglang_inflight.threads import start_thread
from sglang_inflight.vocabulary.errors import Refused

# threads per rank: more would wait for the bus, or for the host's memory
MOST_READERS = 4


def digest_of(
    weights: Sequence[tuple[str, torch.Tensor]],
    check: Callable[[], None],
    readers: int = MOST_READERS,
) -> str:
    """Return the hex digest of ``weights`` in their order, read by ``readers`` threads.

    Requests wait for these weights. Readers hold the interpreter between two pieces only, and
    there are no more readers than cores. ``check`` is called between two pieces, and raises to
    give up.

    Nothing may write ``weights`` before the return. The current stream is waited for before the
    first reader begins, and the caller's thread leaves after the last reader. So no lock is
    needed. A reader owns the tensors it takes from ``left``, whose ``popleft`` is atomic, and
    their lines.
    """
    device = weights[0][1].device if weights else torch.device("cpu")
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()
    parts = [TensorDigest(name, tensor) for name, tensor in weights]
    # largest first: no reader begins a large tensor when the others are done
    left = deque(sorted(parts, key=lambda part: -part.tensor.nbytes))
    failures: list[BaseException] = []
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def read() -> None:
        reader = HostReader()
        try:
            while (part := _taken_from(left)) is not None:
                for _ in part.read(reader):
                    check()
        except BaseException as error:
            failures.append(error)
            left.clear()

    def read_beside() -> None:
        try:
            with _on_a_stream_of(device):
                read()
        finally:
            ended.put(None)

    helpers = 0
    readers = min(readers, len(os.sched_getaffinity(0)))
    try:
        for _ in range(min(readers, len(parts)) - 1):
            start_thread(read_beside, name="inflight-digest")
            helpers += 1
    except Refused:
        # no memory for another thread: the existing ones read all
        pass
    read()
    for _ in range(helpers):
        ended.get()
    if failures:
        raise failures[0]
    digest = Digest()
    for part in parts:
        digest.add(part.line)
    return digest.hexdigest()


def _taken_from(left: deque[TensorDigest]) -> TensorDigest | None:
    try:
        return left.popleft()
    except IndexError:
        return None


def _on_a_stream_of(device: torch.device) -> AbstractContextManager[object]:
    """Return a context with a new stream on ``device``.

    A thread's copies must not wait for another thread's, nor touch another device.
    """
    if device.type == "cpu":
        return nullcontext()
    module = torch.get_device_module(device)
    stream: AbstractContextManager[object] = module.stream(module.Stream(device))
    return stream

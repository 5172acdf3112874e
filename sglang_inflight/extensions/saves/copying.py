"""Copies served weights to the host beside everything else, and never two versions of a piece.

The scheduler's thread exchanges the weights at a commit, and waits for nobody. The saving thread
reads them piece by piece, and looks before and after each piece whether they were exchanged:

    before   nothing is being exchanged, the version is the wanted one, and it is served
    copy     on a device on a stream of its own, after the last exchange's event; the host waits
    after    nothing was exchanged since the first look, and the version is still served

A piece that fails the second look is copied again, or the save ends if the version has moved on.
``LiveWeights.exchanges`` grows before an exchange and after it, on the scheduler's thread. So an
exchange on the host shows in the second look. An exchange on a device is enqueued between the two
counts: one enqueued before the first look has ended before the copy, by its event, and one enqueued
after it shows in the second look, which the host makes after the copy. A write in place begins with
torn weights, and ends with a commit.

Released memory must not even be read. So a copy holds ``lock``, and a release takes it before its
vote, for the time of one piece at most.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator

import torch

from sglang_inflight.scheduler.update.live_weights import LiveWeights
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.tensor_digest import CHUNK_BYTES
from sglang_inflight.vocabulary.errors import Conflict

# pause before another check of weights that are being exchanged
_POLL_S = 0.001
Index = tuple[int | slice, ...]


class PieceCopier:
    """Copies pieces of one version. Belongs to the saving thread, except ``lock``.

    Two buffers take turns: the bytes of a piece are valid until the next but one.
    """

    def __init__(self, live: LiveWeights, lock: threading.Lock, device: torch.device) -> None:
        self._live = live
        self._lock = lock
        self._device = device
        pinned = device.type != "cpu"
        self._buffers = itertools.cycle(
            [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        )

    def pieces_of(
        self,
        tensor: torch.Tensor,
        weights: int,
        check: Callable[[], None],
        rate_limit: RateLimit,
    ) -> Iterator[torch.Tensor]:
        """Yield the elements of ``tensor`` in their order, flat, on the host, piece by piece.

        ``weights`` is the version's number in ``LiveWeights``. Raises ``Conflict`` if another
        version is served. ``check`` raises to give up.
        """
        for index in cut(tensor.shape, CHUNK_BYTES // tensor.element_size()):
            piece = self._copy(tensor, index, weights, check)
            # read, and written to the buffer
            rate_limit.spend(2 * piece.nbytes)
            yield piece

    def read(self, read: Callable[[], None], weights: int, check: Callable[[], None]) -> None:
        """Call ``read`` until nothing was exchanged meanwhile. Raises as ``pieces_of``."""
        while True:
            seen = self._await_no_exchange(weights, check)
            if (swapped := self._live.swapped) is not None:
                swapped.synchronize()
            with self._lock:
                check()
                read()
            if self._live.exchanges == seen:
                require_version(self._live, weights)
                return

    def _await_no_exchange(self, weights: int, check: Callable[[], None]) -> int:
        """Return the count of exchanges, once none is being made."""
        while True:
            check()
            seen = self._live.exchanges
            if seen % 2 == 0:
                break
            time.sleep(_POLL_S)
        require_version(self._live, weights)
        return seen

    def _copy(
        self, tensor: torch.Tensor, index: Index, weights: int, check: Callable[[], None]
    ) -> torch.Tensor:
        buffer = next(self._buffers)
        copied: list[torch.Tensor] = []

        def copy() -> None:
            # anew each time: a commit on a CPU replaces the memory, and finds no user left
            piece = tensor.detach()[index]
            here = buffer[: piece.numel() * piece.element_size()].view(piece.dtype)
            here.view(piece.shape).copy_(piece, non_blocking=True)
            if self._device.type != "cpu":
                torch.get_device_module(self._device).current_stream().synchronize()
            copied[:] = [here]

        self.read(copy, weights, check)
        return copied[0]


def require_version(live: LiveWeights, weights: int) -> None:
    """Raise ``Conflict`` unless the version of number ``weights`` is served, whole."""
    if live.why_not_served is not None:
        raise Conflict(f"the weights cannot be saved: {live.why_not_served}")
    if live.weights != weights:
        raise Conflict("the served version has moved on while it was being saved: save it again")


def cut(shape: torch.Size, most: int) -> Iterator[Index]:
    """Yield the indices of a tensor's pieces, of ``most`` elements, in the elements' order."""
    count = math.prod(shape)
    if count <= most:
        if count:
            yield ()
        return
    row = count // shape[0]
    if row > most:
        for at in range(shape[0]):
            for rest in cut(shape[1:], most):
                yield (at, *rest)
        return
    rows = most // row
    for start in range(0, shape[0], rows):
        yield (slice(start, start + rows),)

"""Swaps live weights and shadow in a commit, in one of two ways, without allocating memory.

    where            what is swapped                        why
    a CPU            the pointers                           no graph holds them
    any other        the contents, through a spare piece    captured graphs hold the pointers

On a CPU too, contents are swapped if something else uses the weight's memory: a view, wherever a
model keeps it, would go on showing the old memory.

Contents are swapped on the current stream, and the host waits for nothing. Any failure happens
before the vote, in ``check`` or at the allocation of the spare piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import increment_version

from sglang_inflight.scheduler.update.changes.exchange import Exchange
from sglang_inflight.storages import span_of
from sglang_inflight.vocabulary.errors import Unproven

Pairs = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""Live weight and shadow of each whole copy."""

# size of the spare piece of device memory, kept from the first update on
SPARE_BYTES = 64 << 20


class Swap(Protocol):
    """Swaps two tensors of one shape and dtype."""

    def check(self, name: str, live: torch.Tensor) -> None:
        """Raise ``Unproven`` if ``swap`` would fail, or forwards might read both versions."""

    def prepare(self, pairs: Pairs) -> Callable[[], None]:
        """Return what exchanges the contents of all ``pairs``. It raises nothing for checked ones.

        Everything that a commit can find ready is made here, on the staging thread.
        """


def swap_for(device: torch.device) -> Swap:
    contents = ContentSwap(device, SPARE_BYTES)
    return PointerSwap(contents) if device.type == "cpu" else contents


class PointerSwap:
    def __init__(self, contents: ContentSwap) -> None:
        self._contents = contents

    def check(self, name: str, live: torch.Tensor) -> None:
        # a view may be made at any time, and contents are swapped then
        self._contents.check(name, live)

    def prepare(self, pairs: Pairs) -> Callable[[], None]:
        return _Pointers(pairs, self._contents)


class _Pointers:
    """Exchanges the pointers of pairs, by few calls of C functions for all of them.

    Python takes a microsecond for each tensor, and a model has thousands. A tensor of its own
    holds each memory, because ``Tensor.data`` would make one at each exchange.
    """

    def __init__(self, pairs: Pairs, contents: ContentSwap) -> None:
        self._pairs = pairs
        self._contents = contents
        live, shadows = [live for live, _ in pairs], [shadow for _, shadow in pairs]
        self._tensors = live + shadows
        # data that ``_tensors`` have now, and data that they get, in their order
        self._has = [tensor.data for tensor in self._tensors]
        self._gets = self._has[len(live) :] + self._has[: len(live)]
        self._storages = [tensor.untyped_storage() for tensor in self._has]
        self._keys = [storage._cdata for storage in self._storages]

    def __call__(self) -> None:
        live = len(self._pairs)
        users = list(map(torch._C._storage_Use_Count, self._keys[:live]))
        # between two steps no kernel has views of its own
        if users.count(_ALONE) == live:
            deque(map(_set_data, self._tensors, self._gets), maxlen=0)
            self._has, self._gets = self._gets, self._has
            self._keys = self._keys[live:] + self._keys[:live]
            return
        for at, count in enumerate(users):
            if count > _ALONE:
                self._contents.swap(*self._pairs[at])
            else:
                self._exchange(at)

    def _exchange(self, at: int) -> None:
        """Exchange the pointers of one pair."""
        for place, other in ((at, at + len(self._pairs)), (at + len(self._pairs), at)):
            _set_data(self._tensors[place], self._has[other])
        for kept in (self._has, self._gets, self._keys):
            other = at + len(self._pairs)
            kept[at], kept[other] = kept[other], kept[at]


class ContentSwap:
    def __init__(self, device: torch.device, spare_bytes: int) -> None:
        self._spare = torch.empty(spare_bytes, dtype=torch.uint8, device=device)

    def check(self, name: str, live: torch.Tensor) -> None:
        if live.device.type == "cpu" and self._spare.device.type != "cpu":
            # copies between two places of the host are not ordered by the device's stream
            raise Unproven(f"{name!r} cannot be staged: it is kept on the host")
        if span_of(live) != live.numel():
            raise Unproven(
                f"{name!r} cannot be staged: its memory has holes (shape {tuple(live.shape)}, "
                f"strides {live.stride()})"
            )

    def prepare(self, pairs: Pairs) -> Callable[[], None]:
        def swap_all() -> None:
            for live, shadow in pairs:
                self.swap(live, shadow)

        return swap_all

    def swap(self, live: torch.Tensor, shadow: torch.Tensor) -> None:
        """Exchange the contents of one pair. Raises nothing for a checked one."""
        size = len(self._spare)
        for a, b in zip(_pieces(live, size), _pieces(shadow, size), strict=True):
            # the stream keeps the order, also after the previous piece's copies
            spare = self._spare[: len(a)]
            spare.copy_(a, non_blocking=True)
            a.copy_(b, non_blocking=True)
            b.copy_(spare, non_blocking=True)
        if not live.is_inference():
            # writes through ``.data`` do not count in the version, by which caches notice a change
            increment_version(live)


@dataclass
class NumberSwap:
    """A number of the served model that an update changes: ``other`` is the one not served.

    ``place``: where the model has it (``finished/places.py``).
    """

    place: Any
    owner: Any
    attribute: str
    other: bool | int | float

    def make(self) -> None:
        served = getattr(self.owner, self.attribute)
        setattr(self.owner, self.attribute, self.other)
        self.other = served


@dataclass(frozen=True)
class PreparedSwap:
    """The exchange of a commit; empty in the mode ``off``.

    ``pairs``: live weight and shadow of each whole copy. ``changes``: elements that differ.
    ``numbers``: Python's numbers, which forwards read when they are launched.

    The staging thread makes this object, and the scheduler's thread makes the swap. The commit's
    message orders the two.
    """

    how: Swap | None = None
    pairs: Pairs = ()
    changes: Exchange | None = None
    numbers: tuple[NumberSwap, ...] = ()
    _exchange: Callable[[], None] = field(init=False, repr=False)
    _nbytes: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        if self.how is not None:
            object.__setattr__(self, "_exchange", self.how.prepare(self.pairs))
            nbytes = sum(live.nbytes for live, _ in self.pairs)
            object.__setattr__(self, "_nbytes", nbytes)

    @property
    def is_possible(self) -> bool:
        return self.how is not None

    def free(self) -> None:
        """Let go of the changes: nobody makes this swap again, and no device is making it."""
        if self.changes is not None:
            self.changes.free()

    def make(self) -> int:
        """Exchange everything, and return the bytes exchanged."""
        if self.how is None:
            return 0
        self._exchange()
        swapped = self._nbytes
        if self.changes is not None:
            swapped += self.changes.make()
        for number in self.numbers:
            number.make()
        return swapped


def _pieces(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor without holes, ``size`` at a time, in memory order."""
    memory = tensor.data.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    for start in range(0, len(memory), size):
        yield memory[start : start + size]


def _count_users_of_lone_memory() -> int:
    """Return how many references ``_Pointers`` finds to memory that a weight has for itself."""
    weight = torch.empty(1)
    memory = weight.data
    storage = memory.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


_ALONE = _count_users_of_lone_memory()
_set_data = vars(torch._C.TensorBase)["data"].__set__

"""Records what an update writes as the set of elements that differ from what is served.

Elements come by moves, by positions, or as a whole weight. They are compared with the live weight
as they come, and only the differences are kept (``encoding.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from sglang_inflight.host_memory import available_to_this_rank, pinned_bytes
from sglang_inflight.scheduler.plans.compare import compare
from sglang_inflight.scheduler.plans.moves import Box
from sglang_inflight.scheduler.plans.targets import Targets
from sglang_inflight.scheduler.update.changes.encoding import (
    PIECE,
    Changes,
    Part,
    bits_of,
    count_changes,
    find_changes,
    has_bits,
    parts_at,
    put_into,
    without_positions,
    without_range,
)
from sglang_inflight.scheduler.update.rate import RateLimit, paced, yield_gil
from sglang_inflight.scheduler.update.weight import Moved, Patch, Weight
from sglang_inflight.vocabulary.answers import StagedChanges
from sglang_inflight.vocabulary.errors import Outgrown, Unproven

_WHY_ON_HOST = (
    "the changes outgrew SGLANG_INFLIGHT_CHANGES_BYTES, or the device had no memory for them"
)
_Found = TypeVar("_Found")
_UNLIMITED = 1 << 62


@dataclass
class _Weight:
    """One weight of an open update."""

    live: torch.Tensor
    parts: list[Part] = field(default_factory=list)


class Budget(NamedTuple):
    """Bytes that an update may take: for scratch memory, and for changes on device and host."""

    windows: int = 64 << 20
    device: int = _UNLIMITED
    # 0 if the weights are on the host, too
    host: int = _UNLIMITED
    # returns how many bytes of the host's memory are free for this rank; None for fixed numbers
    free: Callable[[], int] | None = None

    @classmethod
    def of(cls, nbytes: int, device: torch.device, changes: int | None, windows: int) -> Budget:
        """Return the budget of a rank with ``nbytes`` of weights on ``device``.

        ``changes``: bytes on the device, or None for a tenth of the weights.
        """
        is_host = device.type == "cpu"
        if changes is None:
            changes = _UNLIMITED if is_host else nbytes // 10
        return cls(windows, changes, 0 if is_host else _UNLIMITED, available_to_this_rank)

    def now(self, pinned: int) -> Budget:
        """Return the budget of an update that begins now, by the memory that is free now.

        ``pinned``: bytes in use by earlier updates at most, which torch keeps pinned and gives out
        again.
        """
        if self.free is None:
            return self
        if not self.host:
            return self._replace(device=min(self.device, self.free()))
        return self._replace(host=min(self.host, self.free() + pinned))


class Recording:
    """The changes of the open update of one rank. The staging thread owns it until the seal."""

    def __init__(self, budget: Budget, rate_limit: RateLimit) -> None:
        self._asked = self._budget = budget
        self._rate_limit = rate_limit
        # weights by their ids
        self._weights: dict[int, _Weight] = {}
        # whether the device had no memory for a comparison of this update
        self._compares_on_host = False
        # bytes of the changes on the device, and in the host's memory
        self.nbytes = self.host_bytes = 0
        self.peak_bytes = 0
        # elements that differ from the served ones
        self._changed = 0
        # the most bytes of an update in the host's memory
        self._most_pinned = 0

    def begin(self) -> None:
        """Forget the last update. Its changes belong to its commit by now."""
        # one weight at a time: a step waits for the interpreter while torch frees parts
        while self._weights:
            self._weights.popitem()
            yield_gil()
        self._compares_on_host = False
        self.nbytes = self.host_bytes = self.peak_bytes = self._changed = 0
        self._budget = self._asked.now(self._most_pinned)

    def add(self, weight: Weight) -> None:
        """Record what the update writes to ``weight``."""
        if not has_bits(weight.live):
            raise Unproven(f"{weight.name!r} cannot be staged: it is {weight.live.dtype}")
        self._weights[id(weight.live)] = _Weight(weight.live)

    # ---- what comes ----------------------------------------------------------------------

    def move(self, moved: Sequence[Moved]) -> None:
        """Record moves. No element is recorded twice, unless it was forgotten."""
        groups: dict[tuple[object, ...], list[Moved]] = {}
        for each in moved:
            live, of = each.weight.live, each.of
            groups.setdefault((live.dtype, live.device, of.dtype, of.device), []).append(each)
        for group in groups.values():
            boxes: list[tuple[Weight, Box]] = []
            rows: list[torch.Tensor] = []
            elements = 0
            for weight, box, of in paced(group):
                for part, piece in _pieces(box, of):
                    if elements + piece.numel() > PIECE:
                        self.move_rows(Targets(boxes), rows)
                        boxes, rows, elements = [], [], 0
                    boxes.append((weight, part))
                    rows.append(piece.reshape(-1))
                    elements += piece.numel()
            if boxes:
                self.move_rows(Targets(boxes), rows)

    def move_rows(self, targets: Targets, rows: Sequence[torch.Tensor]) -> None:
        """Record rows that are together that of ``targets``, of at most ``PIECE`` elements.

        They have one dtype and device. No element is recorded twice, unless it was forgotten.
        """
        found = self._on_device_or_host(
            targets.first.device, lambda device: [*compare(targets, rows, device)]
        )
        for weight, part in found:
            self._add(self._weights[id(weight.live)], part)
        self._rate_limit.spend(3 * sum(row.nbytes for row in rows))

    def patch(self, patch: Patch) -> None:
        """Record some elements of a weight. None is recorded twice, unless it was forgotten."""
        live = patch.weight.live

        def compare(device: torch.device) -> list[Part]:
            at, order = patch.at.to(device).sort()
            new = bits_of(patch.values.to(device, live.dtype)[order])
            differs = new != bits_of(live)[at.to(live.device)].to(device)
            return [*parts_at(at[differs], new[differs], live.numel())]

        for part in self._on_device_or_host(live.device, compare):
            self._add(self._weights[id(live)], part)

    def put(self, live: torch.Tensor, new: torch.Tensor) -> None:
        """Record ``new`` for all of a weight, in its layout, whatever was recorded of it."""
        weight = self._weights[id(live)]
        for part in weight.parts:
            self._count(part, -1)
        weight.parts = []
        bits = bits_of(new)
        for start in range(0, len(bits), PIECE):

            def compare(device: torch.device, start: int = start) -> Part | None:
                served = bits_of(live)[start : start + PIECE].to(device)
                return find_changes(start, served, bits[start : start + PIECE].to(device))

            if (found := self._on_device_or_host(live.device, compare)) is not None:
                self._add(weight, found)
            self._rate_limit.spend(3 * bits[start : start + PIECE].nbytes)

    def forget(self, live: torch.Tensor, start: int, end: int) -> None:
        """Forget what was recorded of the elements from position ``start`` to ``end``."""
        self._replace(live, start, end, lambda part: without_range(part, start, end))

    def forget_at(self, live: torch.Tensor, at: torch.Tensor) -> None:
        """Forget what was recorded of the elements at the int64 positions ``at``."""
        if len(at):
            low, high = (int(end) for end in torch.aminmax(at))
            self._replace(live, low, high + 1, lambda part: without_positions(part, at, live))

    def _replace(
        self, live: torch.Tensor, start: int, end: int, rest_of: Callable[[Part], list[Part]]
    ) -> None:
        weight = self._weights[id(live)]
        kept: list[Part] = []
        for part in paced(weight.parts):
            if part.overlaps(start, end):
                rest = rest_of(part)
                self._count(part, -1)
                for one in rest:
                    one.changed = count_changes(one, live)
                    self._count(one, 1)
                kept += rest
            else:
                kept.append(part)
        weight.parts = kept

    def fill(self, live: torch.Tensor, memory: torch.Tensor) -> None:
        """Write a weight as it will be served into ``memory``, of its layout."""
        for to, of in self._rate_limit.cut(memory, live.data):
            to.copy_(of)
        weight = self._weights.get(id(live))
        for part in weight.parts if weight is not None else ():
            put_into(part, bits_of(memory))

    # ---- the seal ---------------------------------------------------------------------

    def changes(self) -> Changes:
        """Return each changed weight with its parts, for the commit."""
        return [(w.live, w.parts) for w in self._weights.values() if w.parts]

    def describe(self) -> StagedChanges:
        """Return this rank's part of the receipt."""
        elements = sum(weight.live.numel() for weight in self._weights.values())
        return StagedChanges(
            form="changes on host" if self.host_bytes else "changes",
            why=_WHY_ON_HOST if self.host_bytes else None,
            changed_elements=self._changed,
            changed_fraction=self._changed / max(1, elements),
            staging_bytes_peak=self.peak_bytes,
        )

    def as_committed(self, live: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield ``live`` with its changes, flat, in the order of its elements, piece by piece."""
        weight = self._weights.get(id(live))
        parts = weight.parts if weight is not None else []
        if weight is None or not parts:
            yield from torch.split(live.detach().contiguous().view(-1), PIECE)
        elif not live.is_contiguous():
            changed = self._with_changes(weight, live.detach(), parts, 0)
            yield from torch.split(changed.contiguous().view(-1), PIECE)
        else:
            flat = live.detach().view(-1)
            for start in range(0, len(flat), PIECE):
                piece = flat[start : start + PIECE]
                within = [p for p in parts if p.overlaps(start, start + PIECE)]
                yield self._with_changes(weight, piece, within, start) if within else piece

    def _with_changes(
        self, weight: _Weight, served: torch.Tensor, parts: list[Part], start: int
    ) -> torch.Tensor:
        def compare(device: torch.device) -> torch.Tensor:
            piece = served.to(device, copy=True)
            for part in parts:
                put_into(part, bits_of(piece), start)
            return piece

        return self._on_device_or_host(weight.live.device, compare)

    # ---- parts ------------------------------------------------------------------------

    def _on_device_or_host(
        self, device: torch.device, compare: Callable[[torch.device], _Found]
    ) -> _Found:
        """Compare where the weight is, or on the host if its device has no memory for that.

        SGLang leaves a device some memory beside the KV cache. Other users may take it.
        """
        if not self._compares_on_host:
            try:
                return compare(device)
            except torch.OutOfMemoryError:
                self._compares_on_host = True
        return compare(torch.device("cpu"))

    def _add(self, weight: _Weight, part: Part) -> None:
        is_elsewhere = part.values.device != weight.live.device
        if is_elsewhere or self.nbytes + part.nbytes > self._budget.device:
            self._move_to_host(part)
        self._count(part, 1)
        self.peak_bytes = max(self.peak_bytes, self.nbytes + self.host_bytes)
        weight.parts.append(part)

    def _move_to_host(self, part: Part) -> None:
        if self.host_bytes + _pinned(part) > self._budget.host:
            raise Outgrown(
                f"the update changes more than {self._budget.device >> 20} MiB "
                f"(SGLANG_INFLIGHT_CHANGES_BYTES) and {self._budget.host >> 20} MiB of the host's "
                "memory hold: send it in several updates, or use SGLANG_INFLIGHT_STAGING=off"
            )
        part.move_to_host()

    def _count(self, part: Part, sign: int) -> None:
        if part.values.device.type == "cpu" and self._budget.host:
            self.host_bytes += sign * _pinned(part)
            self._most_pinned = max(self._most_pinned, self.host_bytes)
        else:
            self.nbytes += sign * part.nbytes
        self._changed += sign * part.changed


def _pinned(part: Part) -> int:
    """Return what ``part`` takes of the host's memory when it is pinned."""
    return pinned_bytes(part.values) + (0 if part.offsets is None else pinned_bytes(part.offsets))


def _pieces(box: Box, of: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the same rows of ``box`` and of ``of``, of its shape, at most ``PIECE`` elements."""
    if of.numel() <= PIECE:
        yield box, of
        return
    (size, *sizes), (stride, *strides) = box.sizes, box.strides
    rows = max(1, PIECE // math.prod(sizes))
    for start in range(0, size, rows):
        part = of[start : start + rows]
        begin = box.offset + start * stride
        if len(part) == 1:
            yield from _pieces(Box(begin, tuple(sizes), tuple(strides)), part[0])
        else:
            yield Box(begin, (len(part), *sizes), box.strides), part

"""Records what an update writes as the set of elements that differ from what is served.

A loader addresses handles (``handles.py``) in place of the weights. Each of its operations comes
through ``Dataflow``, which asks the recording first:

    operation                                     what happens
    a copy into a range of a handle's memory      compared with the live range, piece by piece;
                                                  no memory is written
    any other that reads or writes a handle       the handle becomes a window: its memory is
                                                  filled, and the operation runs on it

A window is compared with the live weight when it closes: at the seal, or when windows take more
than their budget and it is the one used longest ago. A window that opens again has the changes
found before. So neither the order nor the number of a loader's writes matters, and the last one
wins.

A window shows what the loader wrote, so the loader may read that. Where it wrote nothing, a window
of a whole update has marks (``checks/coverage.py``), and a window of a partial update the live
weight. A copied mark leaves its place unwritten.

Memory that no operation of torch's wrote (numpy, another thread) is noticed at the seal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from sglang_inflight.host_memory import available_to_this_rank, pinned_bytes
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
    without_range,
)
from sglang_inflight.scheduler.update.changes.handles import Handle
from sglang_inflight.scheduler.update.changes.intervals import Intervals
from sglang_inflight.scheduler.update.checks.coverage import (
    can_mark,
    count_marked,
    holds_stray,
    is_finite,
    mark,
    marks_in,
    stray_refusal,
)
from sglang_inflight.scheduler.update.plans.compare import Copy, compare
from sglang_inflight.scheduler.update.plans.moves import Box
from sglang_inflight.scheduler.update.rate import RateLimit, paced, yield_gil
from sglang_inflight.scheduler.update.weight import Moved, Patch, Weight
from sglang_inflight.storages import memory_key, span_of
from sglang_inflight.vocabulary.answers import StagedChanges
from sglang_inflight.vocabulary.errors import Outgrown, Refused, Unproven

_WHY_ON_HOST = (
    "the changes outgrew SGLANG_INFLIGHT_CHANGES_BYTES, or the device had no memory for them"
)
_Found = TypeVar("_Found")
_UNLIMITED = 1 << 62


@dataclass
class _Weight:
    """One weight of an open update. ``keeps``: elements that are not sent keep their value."""

    name: str
    live: torch.Tensor
    handle: Handle
    keeps: bool
    parts: list[Part] = field(default_factory=list)
    written: Intervals = field(default_factory=Intervals)

    @property
    def marks(self) -> bool:
        return not self.keeps and can_mark(self.live)


class Budget(NamedTuple):
    """Bytes that a recording may take: for open windows, and for changes on device and host."""

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
        # each weight with its handle, by the handle's memory
        self._handles: dict[int, tuple[torch.Tensor, Handle]] = {}
        # weights by their ids
        self._weights: dict[int, _Weight] = {}
        self._by_memory: dict[int, _Weight] = {}
        self._windows: OrderedDict[int, _Weight] = OrderedDict()
        self._reads_served = False
        # whether NaN stands for what was not sent
        self._leaves_out_nan = False
        # whether the device had no memory for a comparison of this update
        self._compares_on_host = False
        # bytes of the changes on the device, and in the host's memory
        self.nbytes = self.host_bytes = 0
        self.peak_bytes = 0
        # elements that differ from the served ones
        self._changed = 0
        # the most bytes of an update in the host's memory
        self._most_pinned = 0

    def handle_for(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the tensor that a loader addresses in place of ``weight``."""
        handle = Handle(weight)
        self._handles[memory_key(handle.tensor)] = weight, handle
        return handle.tensor

    def begin(self) -> None:
        """Forget the last update. Its changes belong to its commit by now."""
        for weight in self._windows.values():
            weight.handle.release()
        self._windows.clear()
        self._by_memory.clear()
        # one weight at a time: a step waits for the interpreter while torch frees parts
        while self._weights:
            self._weights.popitem()
            yield_gil()
        self._reads_served = self._compares_on_host = False
        self.nbytes = self.host_bytes = self.peak_bytes = self._changed = 0
        self._budget = self._asked.now(self._most_pinned)

    def add(self, name: str, memory: int, *, keeps: bool) -> None:
        """Record the update's writes to the handle at ``memory`` (``memory_key``).

        ``keeps``: the update is partial, and elements that are not sent keep their value.
        """
        live, handle = self._handles[memory]
        if not has_bits(live):
            raise Unproven(f"{name!r} cannot be staged: it is {live.dtype}")
        weight = _Weight(name, live, handle, keeps)
        self._weights[id(live)] = weight
        self._by_memory[memory] = weight

    # ---- moves of planned tensors ------------------------------------------------------

    def move(self, moved: Sequence[Moved]) -> None:
        """Record moves into weights that no loader writes. No element is moved twice."""
        groups: dict[torch.dtype, list[Moved]] = {}
        for each in moved:
            groups.setdefault(each.weight.live.dtype, []).append(each)
        for group in groups.values():
            for batch in self._batches(group):
                for weight, part in self._compare_moved(batch):
                    self._add(self._weights[id(weight.live)], part)
                self._rate_limit.spend(3 * sum(each.to.nbytes for each in batch))

    def _batches(self, moved: Iterable[Moved]) -> Iterator[list[Copy]]:
        """Yield copies to the served weights, at most ``PIECE`` elements at a time."""
        batch: list[Copy] = []
        elements = 0
        for weight, box, of in paced(moved):
            for to, piece in _pieces(box.view(weight.live.data), of):
                if elements + to.numel() > PIECE:
                    yield batch
                    batch, elements = [], 0
                batch.append(Copy(weight, to, piece))
                elements += to.numel()
        if batch:
            yield batch

    def _compare_moved(self, batch: Sequence[Copy]) -> list[tuple[Weight, Part]]:
        device = batch[0].to.device
        return self._on_device_or_host(device, lambda device: [*compare(batch, device)])

    def patch(self, patch: Patch) -> None:
        """Record some elements of a weight that no loader writes. No element comes twice."""
        live = patch.weight.live

        def compare(device: torch.device) -> list[Part]:
            at, order = patch.at.to(device).sort()
            new = bits_of(patch.values.to(device, live.dtype)[order])
            differs = new != bits_of(live)[at.to(live.device)].to(device)
            return [*parts_at(at[differs], new[differs], live.numel())]

        for part in self._on_device_or_host(live.device, compare):
            self._add(self._weights[id(live)], part)

    def leave(self, live: torch.Tensor, sent: Iterable[Box], *, keeps: bool) -> None:
        """Let a loader write a weight, too. ``sent``: where elements were moved so far."""
        weight = self._weights[id(live)]
        weight.keeps = keeps
        if not weight.marks:
            return
        for box in sent:
            view = box.view(live.data)
            start = box.offset
            if view.is_contiguous():
                weight.written.add(start, start + view.numel())
            else:
                span = torch.zeros(span_of(view), dtype=torch.bool)
                span.as_strided(box.sizes, box.strides).fill_(True)
                weight.written.add_where(start, span)

    # ---- the loader's operations -----------------------------------------------------

    def copy(self, to: torch.Tensor, of: torch.Tensor) -> bool:
        """Record ``to.copy_(of)``. Return False if the caller shall make the copy itself."""
        weight = self._by_memory.get(memory_key(to))
        if weight is None:
            return False
        is_range = to.is_contiguous() and to.dtype == weight.live.dtype
        if id(weight.live) in self._windows or not is_range or of.dim() > to.dim():
            self.touch([to])
            return False
        if to.numel():
            start = int(to.storage_offset())
            if self._leaves_out_nan and self._has_changes(weight, start, start + to.numel()):
                # some of these changes stay, and others go
                self.touch([to])
                return False
            self._forget_range(weight, start, start + to.numel())
            self._compare(weight, to, of.expand(to.shape))
        return True

    def touch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give those of ``tensors`` their memory that are parts of handles, for an operation."""
        used = []
        for memory in {memory_key(tensor) for tensor in tensors} & self._handles.keys():
            if memory not in self._by_memory:
                # another model's weight, which this update only reads
                self.add("", memory, keeps=True)
            used.append(self._by_memory[memory])
        if not used:
            return
        for weight in used:
            if id(weight.live) not in self._windows:
                self._open(weight)
            self._windows.move_to_end(id(weight.live))
        needed = {id(weight.live) for weight in used}
        while self._open_bytes() > self._budget.windows:
            oldest = next(iter(self._windows.values()))
            if id(oldest.live) in needed:
                break
            self._close(oldest)

    @contextmanager
    def leaving_out_nan(self) -> Iterator[None]:
        """Take NaN for what was not sent: within this context no tensor sends NaN."""
        self._close_all()
        self._leaves_out_nan = True
        try:
            yield
            self._close_all()
        finally:
            self._leaves_out_nan = False

    def read_as_served(self) -> None:
        """Let windows show the weights as they will be served, from now on."""
        self._close_all()
        self._reads_served = True

    # ---- the seal ---------------------------------------------------------------------

    def close(self, *, check_finite: bool) -> None:
        """Compare all windows.

        Raise ``Refused`` if a handle was written behind torch's back, or if a change is a mark.
        With ``check_finite`` NaN is refused, too, unless it is served already.
        """
        self._close_all()
        for weight in self._weights.values():
            if weight.handle.is_touched():
                weight.handle.release()
                raise Refused(
                    f"the model's loader uses the memory of {weight.name!r} past torch's "
                    "operations (through numpy, a kernel or another thread), where changes are "
                    "not seen: SGLANG_INFLIGHT_STAGING=device or host stages this model"
                )
            if any(self._is_stray(weight, part, check_finite) for part in weight.parts):
                raise stray_refusal(weight.name)

    def _is_stray(self, weight: _Weight, part: Part, check_finite: bool) -> bool:
        if not can_mark(weight.live):
            return False
        self._rate_limit.spend(part.values.nbytes)
        new = part.values.view(weight.live.dtype)
        if is_finite(new):
            return False
        served = bits_of(weight.live)[part.start : part.start + part.length].to(new.device)
        if part.offsets is not None:
            served = served[part.positions()]
        return holds_stray(new, served.view(new.dtype), check_finite=check_finite)

    def unwritten(self, live: torch.Tensor) -> int:
        """Return how many elements no tensor wrote, 0 for weights that keep theirs."""
        weight = self._weights[id(live)]
        return live.numel() - len(weight.written) if weight.marks else 0

    def keep(self, live: torch.Tensor) -> None:
        """Count all elements of ``live`` as written if none was."""
        weight = self._weights[id(live)]
        if not len(weight.written):
            weight.written.add(0, live.numel())

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

    def _compare(self, weight: _Weight, to: torch.Tensor, of: torch.Tensor) -> None:
        """Add what of ``of`` differs from the live weight. ``to`` is a range of the handle."""
        for to_piece, of_piece in _pieces(to, of):
            start, length = int(to_piece.storage_offset()), to_piece.numel()

            def compare(
                device: torch.device, start: int = start, of: torch.Tensor = of_piece
            ) -> tuple[torch.Tensor | None, Part | None]:
                new = of.to(device, weight.live.dtype).contiguous().view(-1)
                served = bits_of(weight.live)[start : start + len(new)].to(device)
                if not self._leaves_out_nan:
                    part = find_changes(start, served, bits_of(new))
                    changed = new[:0] if part is None else part.values.view(new.dtype)
                    if not weight.marks or not count_marked(changed):
                        return None, part
                    # a copy of elements that were not sent yet
                    written = ~marks_in(new)
                    return written, find_changes(start, served, bits_of(new), written)
                written = ~new.isnan()
                if weight.keeps:
                    # the served elements may be exchanged, too, and a whole range costs less
                    new = torch.where(written, new, served.view(new.dtype))
                    return written, find_changes(start, served, bits_of(new))
                return written, find_changes(start, served, bits_of(new), written)

            written, part = self._on_device_or_host(weight.live.device, compare)
            if written is None:
                weight.written.add(start, start + length)
            elif not weight.keeps:
                if not self._leaves_out_nan:
                    weight.written.discard(start, start + length)
                weight.written.add_where(start, written)
            self._add(weight, part)
            self._rate_limit.spend(of_piece.nbytes + 2 * length * weight.live.element_size())

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

    def _add(self, weight: _Weight, part: Part | None) -> None:
        if part is None:
            return
        is_elsewhere = part.values.device != weight.live.device
        if is_elsewhere or self.nbytes + part.nbytes > self._budget.device:
            self._move_to_host(part)
        self._count(part, 1)
        self.peak_bytes = max(self.peak_bytes, self.nbytes + self.host_bytes + self._open_bytes())
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

    def _forget_range(self, weight: _Weight, start: int, end: int) -> None:
        if not self._has_changes(weight, start, end):
            return
        kept: list[Part] = []
        for part in weight.parts:
            if part.overlaps(start, end):
                rest = without_range(part, start, end)
                self._count(part, -1)
                for one in rest:
                    one.changed = count_changes(one, weight.live)
                    self._count(one, 1)
                kept += rest
            else:
                kept.append(part)
        weight.parts = kept

    def _has_changes(self, weight: _Weight, start: int, end: int) -> bool:
        if not weight.parts or not (weight.keeps or weight.written.overlaps(start, end)):
            return False
        return any(p.overlaps(start, end) for p in weight.parts)

    # ---- windows ----------------------------------------------------------------------

    def _open(self, weight: _Weight) -> None:
        memory = weight.handle.tensor
        has_marks = weight.marks and not self._reads_served
        if not has_marks or len(weight.written):
            # an element that was written and is in no part has come as it is served
            for to, of in self._rate_limit.cut(memory, weight.live.data):
                to.copy_(of)
        if has_marks:
            row = memory.as_strided((memory.numel(),), (1,))
            for start, end in weight.written.gaps(memory.numel()):
                for (piece,) in self._rate_limit.cut(row[start:end]):
                    mark(piece)
        bits = bits_of(memory)
        for part in weight.parts:
            put_into(part, bits)
        self._windows[id(weight.live)] = weight
        self.peak_bytes = max(self.peak_bytes, self.nbytes + self.host_bytes + self._open_bytes())

    def _close(self, weight: _Weight) -> None:
        del self._windows[id(weight.live)]
        before, weight.parts = weight.parts, []
        for part in before:
            self._count(part, -1)
        new = weight.handle.tensor.as_strided((weight.live.numel(),), (1,))
        for start in range(0, len(new), PIECE):

            def compare(
                device: torch.device, start: int = start
            ) -> tuple[torch.Tensor | None, Part | None]:
                piece = new[start : start + PIECE].to(device)
                served = bits_of(weight.live)[start : start + PIECE].to(device)
                sent = None
                if weight.marks and not self._reads_served:
                    # a mark that was computed with is NaN, too
                    sent = ~(piece.isnan() if self._leaves_out_nan else marks_in(piece))
                written = sent
                if self._leaves_out_nan and piece.is_floating_point():
                    piece, written = _without_nan(before, start, served, piece, written)
                return sent, find_changes(start, served, bits_of(piece), written)

            sent, changes = self._on_device_or_host(weight.live.device, compare)
            if sent is not None:
                if not self._leaves_out_nan:
                    weight.written.discard(start, start + len(sent))
                weight.written.add_where(start, sent)
            self._add(weight, changes)
            self._rate_limit.spend(3 * len(new[start : start + PIECE]) * new.element_size())
        weight.handle.release()

    def _close_all(self) -> None:
        while self._windows:
            self._close(next(iter(self._windows.values())))

    def _open_bytes(self) -> int:
        return sum(weight.live.nbytes for weight in self._windows.values())


def _pinned(part: Part) -> int:
    """Return what ``part`` takes of the host's memory when it is pinned."""
    return pinned_bytes(part.values) + (0 if part.offsets is None else pinned_bytes(part.offsets))


def _without_nan(
    before: list[Part],
    start: int,
    served: torch.Tensor,
    piece: torch.Tensor,
    written: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Put the ``served`` element, or its change found ``before``, where ``piece`` has NaN.

    Return the piece, and which of it is written or changed.
    """
    as_was = served.clone()
    for part in before:
        if part.overlaps(start, start + len(piece)):
            put_into(part, as_was, start)
    is_sent = ~piece.isnan()
    whole = torch.where(is_sent, piece, as_was.view(piece.dtype))
    return whole, None if written is None else (written & is_sent) | (as_was != served)


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield the same rows of ``tensors``, of one shape, at most ``PIECE`` elements at a time."""
    first = tensors[0]
    if first.numel() <= PIECE:
        yield tensors
        return
    if len(first) == 1:
        yield from _pieces(*(tensor[0] for tensor in tensors))
        return
    rows = max(1, PIECE // (first.numel() // len(first)))
    for piece in zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True):
        yield from _pieces(*piece)

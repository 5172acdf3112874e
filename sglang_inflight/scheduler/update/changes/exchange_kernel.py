"""The exchange on a device: one launch over a table of blocks, for each width of elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_inflight.scheduler.update.changes.encoding import BLOCK, Part

_TILE = 1024
_WIDTHS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit  # type: ignore[untyped-decorator]
def _exchange(table, TYPE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Exchange one block: a row of the table has three addresses and a count, see ``_rows_of``.

    No element is in two blocks, so the programs need no order.
    """
    row = table + tl.program_id(0).to(tl.int64) * 4
    live = tl.load(row).to(tl.pointer_type(TYPE))
    values = tl.load(row + 1).to(tl.pointer_type(TYPE))
    offsets = tl.load(row + 2)
    count = tl.load(row + 3).to(tl.int32)
    for begin in range(0, count, TILE):
        at = begin + tl.arange(0, TILE)
        inside = at < count
        place = at
        if offsets != 0:
            place = tl.load(offsets.to(tl.pointer_type(tl.uint16)) + at, mask=inside, other=0)
            place = place.to(tl.int32)
        old = tl.load(live + place, mask=inside)
        new = tl.load(values + at, mask=inside)
        tl.store(live + place, new, mask=inside)
        tl.store(values + at, old, mask=inside)


class Launch:
    """The launches of one update, prepared by the staging thread.

    Preparing copies the tables to the device, and compiles the kernel by a launch over an empty
    row: a commit only launches. ``parts`` are held, because the tables have their addresses.
    """

    def __init__(self, parts: list[tuple[torch.Tensor, Part]]) -> None:
        self._parts = parts
        rows: dict[int, list[tuple[int, int, int, int]]] = {}
        for bits, part in parts:
            rows.setdefault(bits.element_size(), []).extend(_rows_of(bits, part))
        device = parts[0][0].device
        self._tables = {
            width: torch.tensor(found, dtype=torch.int64, device=device)
            for width, found in rows.items()
        }
        nothing = torch.zeros(1, 4, dtype=torch.int64, device=device)
        for width in self._tables:
            _exchange[(1,)](nothing, _WIDTHS[width], _TILE)

    def __call__(self, parts: list[tuple[torch.Tensor, Part]]) -> None:
        for width, table in self._tables.items():
            _exchange[(len(table),)](table, _WIDTHS[width], _TILE)
        for _, part in parts:
            part.is_live = not part.is_live


def _rows_of(bits: torch.Tensor, part: Part) -> list[tuple[int, int, int, int]]:
    """Return (address in the weight, address of values, of offsets or 0, count) of each block."""
    width = bits.element_size()
    start = bits.data_ptr() + part.start * width
    values = part.values.data_ptr()
    if part.offsets is None:
        counts = [min(BLOCK, part.length - at) for at in range(0, part.length, BLOCK)]
    else:
        counts = list(part.counts)
    rows = []
    begin = 0
    for block, count in enumerate(counts):
        offsets = 0 if part.offsets is None else part.offsets.data_ptr() + 2 * begin
        if count:
            rows.append((start + block * BLOCK * width, values + begin * width, offsets, count))
        begin += count
    return rows

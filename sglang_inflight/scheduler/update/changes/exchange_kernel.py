"""The exchange on a device: one launch over a table of blocks, for each width of elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_inflight.scheduler.update.changes.encoding import Changes
from sglang_inflight.scheduler.update.changes.tables import build_tables

_TILE = 1024
_WIDTHS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit  # type: ignore[untyped-decorator]
def _exchange(table, TYPE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Exchange one block: a row of the table has three addresses and a count, see ``tables.py``.

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
    row: a commit only launches.
    """

    def __init__(self, changes: Changes, device: torch.device) -> None:
        """``changes`` must be held as long as launches run: the tables have addresses."""
        self._tables = build_tables(changes, device)
        nothing = torch.zeros(1, 4, dtype=torch.int64, device=device)
        for width in self._tables:
            _exchange[(1,)](nothing, _WIDTHS[width], _TILE)

    def __call__(self) -> None:
        for width, table in self._tables.items():
            _exchange[(len(table),)](table, _WIDTHS[width], _TILE)

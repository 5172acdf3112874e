"""The tables of an exchange on a device: a row for each block with changes.

A row is four int64: the block's address in the weight, the addresses of its values and of its
offsets (0 if the values have the whole range), and how many values it has. A rank with 84 GB of
weights has 1.3 million rows. So numpy makes them from the parts' columns, some thousands at a time:
a call that made all of them would hold the interpreter for a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from sglang_inflight.scheduler.update.changes.encoding import BLOCK, OFFSET_BYTES, Changes, Part
from sglang_inflight.scheduler.update.rate import yield_gil

# a part of the usual size has 16 rows
_PARTS_AT_ONCE = 128


def build_tables(changes: Changes, device: torch.device) -> dict[int, torch.Tensor]:
    """Return the table of each width of elements, int64 of shape (rows, 4), on ``device``.

    The tables have addresses: ``changes`` must be held while they are used.
    """
    rows: dict[int, list[np.ndarray]] = {}
    for width, address, parts in _runs(changes):
        rows.setdefault(width, []).append(_rows_of(width, address, parts))
        yield_gil()
    return {width: _joined(found, device) for width, found in rows.items()}


def _runs(changes: Changes) -> Iterator[tuple[int, list[int], list[Part]]]:
    """Yield width, each part's address in its weight, and parts, some at a time."""
    waiting: dict[int, tuple[list[int], list[Part]]] = {}
    for weight, parts in changes:
        width, start = weight.element_size(), weight.data_ptr()
        addresses, run = waiting.setdefault(width, ([], []))
        for part in parts:
            addresses.append(start + part.start * width)
            run.append(part)
            if len(run) == _PARTS_AT_ONCE:
                yield width, addresses, run
                addresses, run = waiting[width] = [], []
    for width, (addresses, run) in waiting.items():
        if run:
            yield width, addresses, run


def _rows_of(width: int, addresses: list[int], parts: list[Part]) -> np.ndarray:
    blocks = [part.block_counts for part in parts]
    counts = np.concatenate(blocks)
    per_part = np.fromiter(map(len, blocks), np.int64, len(parts))
    first = np.cumsum(per_part) - per_part
    # values before each block, in its part
    before = np.cumsum(counts) - counts
    before -= np.repeat(before[first], per_part)
    block = np.arange(len(counts)) - np.repeat(first, per_part)
    values = _addresses(part.values for part in parts)
    offsets = _addresses(part.offsets for part in parts)
    rows = np.empty((len(counts), 4), np.int64)
    rows[:, 0] = np.repeat(np.array(addresses, np.int64), per_part) + block * (BLOCK * width)
    rows[:, 1] = np.repeat(values, per_part) + before * width
    rows[:, 2] = np.repeat(offsets, per_part)
    rows[:, 2] += np.where(rows[:, 2] != 0, OFFSET_BYTES * before, 0)
    rows[:, 3] = counts
    return rows[counts > 0]


def _addresses(tensors: Iterable[torch.Tensor | None]) -> np.ndarray:
    return np.array([0 if t is None else t.data_ptr() for t in tensors], np.int64)


def _joined(rows: list[np.ndarray], device: torch.device) -> torch.Tensor:
    table = torch.empty(sum(map(len, rows)), 4, dtype=torch.int64, device=device)
    end = len(table)
    while rows:
        # freed one by one, for the same reason
        some = rows.pop()
        table[end - len(some) : end].copy_(torch.from_numpy(some))
        end -= len(some)
        yield_gil()
    return table

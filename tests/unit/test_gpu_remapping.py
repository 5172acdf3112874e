"""Pages exchanged under addresses that stay, with the host's pages in place of a card's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda.bindings import driver as nvidia

from benchmarks.gpu.exchanges import Wrong
from benchmarks.gpu.remapping import (
    ON_DEVICE,
    PINNED,
    READ_AND_WRITE,
    RECOMMENDED,
    Access,
    Arena,
    Driver,
    DriverError,
    Location,
    Properties,
    Took,
)
from benchmarks.gpu.steps.remap import Halves, measure
from tests.support.host_pages import GRANULARITY, HostPages

CPU = torch.device("cpu")
PIECE = 3 * GRANULARITY
# not a multiple of two pieces
SIZE = 2 * PIECE - 8


@pytest.fixture
def pages() -> HostPages:
    return HostPages()


@pytest.fixture
def arena(pages: HostPages) -> Iterator[Arena]:
    arena = Arena(Driver(pages), SIZE, 2)
    yield arena
    arena.close()


def test_contents_change_under_an_address_that_stays(arena: Arena) -> None:
    row = arena.tensor(CPU)
    row.fill_(1)
    arena.exchange()
    assert row.sum() == 0
    row[0] = 2
    arena.exchange()
    assert row.sum() == len(row)
    arena.exchange()
    assert row.sum() == 2
    assert row.data_ptr() == arena.address


def test_exchange_gives_access_last_and_once(pages: HostPages, arena: Arena) -> None:
    pages.calls.clear()
    arena.exchange()
    assert pages.calls == [
        ("Unmap", 0, PIECE),
        ("Unmap", PIECE, PIECE),
        ("Map", 0, PIECE),
        ("Map", PIECE, PIECE),
        ("SetAccess", 0, 2 * PIECE),
    ]


@pytest.mark.parametrize("handles", [1, 4, 7])
def test_sizes_are_rounded_up_to_the_granularity(pages: HostPages, handles: int) -> None:
    arena = Arena(Driver(pages), SIZE, handles)
    sizes = {call[1] for call in pages.calls if call[0] == "Create"}
    assert len(sizes) == 1
    assert arena.size == handles * sizes.pop()
    assert SIZE <= arena.size < SIZE + handles * GRANULARITY
    assert arena.tensor(CPU).nbytes == arena.size
    assert len(pages.handles) == 2 * handles
    arena.close()


def test_everything_is_given_back(pages: HostPages) -> None:
    arena = Arena(Driver(pages), SIZE, 2)
    arena.exchange()
    arena.close()
    assert not pages.mapped
    assert not pages.handles
    assert not pages.ranges
    assert pages.calls[-1][0] == "AddressFree"


def test_what_was_made_is_given_back_when_memory_runs_out() -> None:
    pages = HostPages(memory=3 * PIECE)
    with pytest.raises(DriverError, match=r"cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        Arena(Driver(pages), SIZE, 2)
    assert not pages.handles
    assert not pages.ranges


def test_two_exchanges_are_timed_and_read(arena: Arena) -> None:
    values: dict[str, Any] = {}
    measure(values, Halves(arena, CPU), 2)
    assert values["exchange_us_n"] == values["unmap_us_n"] == 2
    assert values["exchange_us"] >= values["map_us"]


def test_pages_that_stay_are_noticed(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = Halves(arena, CPU)
    monkeypatch.setattr(arena, "exchange", lambda: Took(0, 0, 0))
    with pytest.raises(Wrong, match="does not read 2 everywhere"):
        measure({}, halves, 1)


def test_structures_are_laid_out_like_nvidias() -> None:
    kind, place = nvidia.CUmemAllocationType, nvidia.CUmemLocationType
    theirs = nvidia.CUmemAllocationProp()
    theirs.type = kind.CU_MEM_ALLOCATION_TYPE_PINNED
    theirs.location.type = place.CU_MEM_LOCATION_TYPE_DEVICE
    theirs.location.id = 3
    theirs.win32HandleMetaData = 5
    theirs.allocFlags.usage = 7
    ours = Properties(type=PINNED, location=Location(ON_DEVICE, 3), win32_metadata=5)
    ours.flags.usage = 7
    assert bytes(ours) == ctypes.string_at(theirs.getPtr(), ctypes.sizeof(ours))
    access = nvidia.CUmemAccessDesc()
    access.location.type = place.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 3
    access.flags = nvidia.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    our_access = Access(Location(ON_DEVICE, 3), READ_AND_WRITE)
    assert bytes(our_access) == ctypes.string_at(access.getPtr(), ctypes.sizeof(our_access))
    flag = nvidia.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    assert flag == RECOMMENDED

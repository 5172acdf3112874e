"""Physical pages exchanged under a captured graph, beside an idle card and beside a busy stream.

The driver's calls are the host's work, so the host's clock times them. Their alternative is the
exchange of contents, whose time at the copy bandwidth stands beside them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from benchmarks.gpu import card
from benchmarks.gpu.card import need_gpu
from benchmarks.gpu.exchanges import Wrong, need_memory
from benchmarks.gpu.remapping import Arena, Driver, Took
from benchmarks.gpu.step import WARM_UPS, Step, Values, main, spread

LIMIT_S = 90
GB = 1 << 30
SIZES = (1 * GB, 4 * GB, 16 * GB)
HANDLES = (1, 16, 256)
RUNS = 20
BESIDE_RUNS = 7
# the other stream's copies at each exchange: they take an H100 some 40 ms
BESIDE_BYTES = GB // 2
BESIDE_COPIES = 120
# elements that one kernel sums up: 1 GiB
CHUNK = GB // 8


class Reader:
    """A captured graph that reads all of a range, and what its last replay has found there."""

    def __init__(self, row: torch.Tensor) -> None:
        self._row = row
        self._chunks = row.split(CHUNK)
        self._sums = torch.zeros(len(self._chunks), dtype=torch.int64, device=row.device)
        self._graph: Any = None
        self._read()
        if row.device.type != "cpu":
            self._graph = card.module().CUDAGraph()
            with card.module().graph(self._graph):
                self._read()

    def _read(self) -> None:
        for at, chunk in enumerate(self._chunks):
            torch.sum(chunk, 0, out=self._sums[at])

    def expect(self, value: int) -> None:
        """Replay, and raise ``Wrong`` unless every element is ``value``. Waits for the stream."""
        if self._graph is None:
            self._read()
        else:
            self._graph.replay()
        found = self._sums.tolist()
        wanted = [value * len(chunk) for chunk in self._chunks]
        if found != wanted:
            raise Wrong(f"The graph does not read {value} everywhere after an exchange of pages.")


class Beside:
    """Work on another stream and on memory of its own, for a while."""

    def __init__(self) -> None:
        self._of, self._to = (
            torch.ones(BESIDE_BYTES, dtype=torch.uint8, device=card.device()) for _ in range(2)
        )
        self._stream = card.module().Stream()
        self._stream.wait_stream(card.module().current_stream())
        self._begin, self._end = (card.module().Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        with card.module().stream(self._stream):
            self._begin.record()
            for _ in range(BESIDE_COPIES):
                self._to.copy_(self._of)
            self._end.record()

    def is_running(self) -> bool:
        return not self._end.query()

    def wait(self) -> float:
        """Wait for the end of the work, and return its milliseconds."""
        self._end.synchronize()
        return self._begin.elapsed_time(self._end)


class Halves:
    """An arena whose halves hold 1 and 2 everywhere, and a graph that reads it."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self._arena = arena
        row = arena.tensor(device)
        self._value = 1
        row.fill_(1)
        _wait(device)
        arena.exchange()
        row.fill_(2)
        _wait(device)
        arena.exchange()
        self._reader = Reader(row)
        self._reader.expect(1)

    def exchange(self) -> Took:
        """Exchange the pages while no kernel uses them."""
        self._value = 3 - self._value
        return self._arena.exchange()

    def expect(self) -> None:
        """Raise ``Wrong`` unless the graph reads the half that is mapped."""
        self._reader.expect(self._value)


def measure(values: Values, halves: Halves, runs: int) -> None:
    """Time ``runs`` exchanges, and check the graph's output after each."""
    took: list[Took] = []
    for _ in range(WARM_UPS + runs):
        took.append(halves.exchange())
        halves.expect()
    _note(values, "", took[WARM_UPS:])


def measure_beside(values: Values, halves: Halves, beside: Beside) -> None:
    """Time exchanges while another stream is busy."""
    took: list[Took] = []
    still: list[bool] = []
    lasted: list[float] = []
    for _ in range(WARM_UPS + BESIDE_RUNS):
        beside.start()
        took.append(halves.exchange())
        still.append(beside.is_running())
        halves.expect()
        lasted.append(beside.wait())
    _note(values, "beside_", took[WARM_UPS:])
    # zero says that the driver has waited for the other stream, or took longer than its work
    values["other_stream_went_on_count"] = sum(still[WARM_UPS:])
    values |= spread("other_stream_ms", lasted[WARM_UPS:])


def _note(values: Values, when: str, took: list[Took]) -> None:
    values |= spread(f"{when}exchange_us", [one.whole for one in took])
    for name in Took._fields:
        values |= spread(f"{when}{name}_us", [getattr(one, name) for one in took])


def run(step: Step) -> None:
    rate = step.found("bandwidth", "copy").get("copy_bytes_per_s")
    for size in SIZES:
        for handles in HANDLES:
            with step.part(name_of(size, handles)) as values:
                need_gpu("The glass card has none of the driver's calls that map pages.")
                need_memory(2 * size + 2 * BESIDE_BYTES + GB)
                on_card(values, size, handles)
                if rate is not None:
                    values["copies_at_bandwidth_us"] = 4 * values["bytes"] / rate * 1e6


def on_card(values: Values, size: int, handles: int) -> None:
    """Exchange ``size`` bytes by ``handles`` handles on the first card."""
    gpu = torch.device("cuda", torch.cuda.current_device())
    # this makes the card's context current
    beside = Beside()
    driver = Driver(ctypes.CDLL("libcuda.so.1"), gpu.index)
    arena = Arena(driver, size, handles)
    try:
        values |= {"bytes": arena.size, "granularity_bytes": driver.granularity()}
        halves = Halves(arena, gpu)
        measure(values, halves, RUNS)
        measure_beside(values, halves, beside)
    finally:
        torch.cuda.synchronize()
        arena.close()


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def name_of(size: int, handles: int) -> str:
    """Return the name of a part."""
    return f"{size // GB} GiB by {handles} handle{'s' if handles > 1 else ''}"


def names() -> list[str]:
    """Return the name of each part."""
    return [name_of(size, handles) for size in SIZES for handles in HANDLES]


if __name__ == "__main__":
    main("remap", "Pages exchanged under a captured graph", names(), run)

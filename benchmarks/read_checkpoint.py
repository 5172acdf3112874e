"""Time to read a checkpoint into the shadow, beside a memory map.

Our reader reads files into reused memory; SGLang's reader maps them. Both then do staging's work on
each tensor: look for NaN, and copy. No requests run and nothing is paced. Warm means that the
kernel has the file in memory, cold that the kernel dropped it. ``held`` is the longest time another
thread of the process waited for the interpreter, as the scheduler's loop would.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator

from benchmarks.common import models, options
from benchmarks.common.report import Report, Summary
from sglang_inflight.scheduler.update.checks.coverage import is_finite
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.checkpoint_files import read_safetensors

Weights = Iterator[tuple[str, torch.Tensor]]

BEAT_S = 0.001


def main(
    size: options.Size = "1.5b",
    turns: Annotated[int, typer.Option(min=1, help="readings of each kind")] = 5,
    json: options.Json = None,
) -> None:
    """Seconds to read a checkpoint, with and without a memory map, warm and cold."""
    report = Report(
        "read_checkpoint",
        ("file", "reader", "s", "held, ms"),
        {"size": size, "turns": turns},
    )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = models.build(Path(folder), size) / models.WEIGHTS
        report.facts["model_bytes"] = {size: path.stat().st_size}
        shadow = {name: tensor.clone() for name, tensor in ours(path)}
        for state, prepare in (("warm", warm), ("cold", forget)):
            seconds: dict[str, list[float]] = {reader.__name__: [] for reader in READERS}
            held: dict[str, list[float]] = {reader.__name__: [] for reader in READERS}
            for _ in range(turns):
                for reader in READERS:
                    prepare(path)
                    took, longest = measure(reader, path, shadow)
                    seconds[reader.__name__].append(took)
                    held[reader.__name__].append(1000 * longest)
            for name in seconds:
                report.add(
                    file=state,
                    reader=name,
                    s=Summary.of(seconds[name]),
                    held=Summary.of(held[name]),
                )
            ratio = Summary.of(seconds["ours"]).median / Summary.of(seconds["mapped"]).median
            report.goal(f"{state}: ours over mapped, at most 1.1", ratio, at_most=1.1)
    report.show()
    report.write(json)


def measure(
    reader: Callable[[Path], Weights], path: Path, shadow: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """Return the total seconds, and the longest wait for the interpreter."""
    beat = Beat()
    begin = time.perf_counter()
    for name, tensor in reader(path):
        assert is_finite(tensor)
        shadow[name].copy_(tensor)
    return time.perf_counter() - begin, beat.end()


def ours(path: Path) -> Weights:
    with AbandonableThread(lambda: None) as thread:
        yield from read_safetensors([str(path)], thread, UNPACED)


def mapped(path: Path) -> Weights:
    yield from safetensors_weights_iterator([str(path)])


READERS = (ours, mapped)


class Beat:
    """A thread that wants the interpreter every millisecond."""

    def __init__(self) -> None:
        self._longest = 0.0
        self._goes_on = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> float:
        self._goes_on = False
        self._thread.join()
        return self._longest

    def _run(self) -> None:
        last = time.perf_counter()
        while self._goes_on:
            time.sleep(BEAT_S)
            now = time.perf_counter()
            self._longest = max(self._longest, now - last - BEAT_S)
            last = now


def warm(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(16 << 20)
        while file.readinto(buffer):
            pass


def forget(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    typer.run(main)

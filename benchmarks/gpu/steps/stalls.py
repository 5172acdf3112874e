"""How long a commit stops 16 streams, and how fast they decode beside staging at each pace.

Each server also decodes as long without an update, before and after. So a gap or a rate has its
control in the same run.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gpu.card import need_gpu
from benchmarks.gpu.marked import LARGE, TINY
from benchmarks.gpu.servers import (
    Stream,
    Window,
    copy_bytes_per_s,
    end_streams,
    expect_graphs,
    gaps,
    label_values,
    serving,
    start_streams,
    started,
    tokens_per_s,
)
from benchmarks.gpu.step import Step, Values, main, spread
from harness.server import Server
from tests.support.load import update
from tests.support.updates import LIVE

LIMIT_S = 180
GIB = 1 << 30
# form and pace in GiB per second; None is the package's own pace, 0 is none
CONFIGURATIONS: dict[str, tuple[str, int | None]] = {
    "changes": ("changes", None),
    "device": ("device", None),
    "host": ("host", None),
    "changes, 25 GiB/s": ("changes", 25),
    "changes, 400 GiB/s": ("changes", 400),
    "changes, unpaced": ("changes", 0),
}
PARTS = ("bandwidth", *CONFIGURATIONS)
UPDATES = 5
# a live element and its new value change places: two reads and two writes of 2 bytes
_EXCHANGED_BYTES = 8
# longer than a few steps, also on a CPU
_QUIET_S = 2.0


def run(step: Step) -> None:
    model = TINY if step.small else LARGE
    peak: float | None = None
    with step.part("bandwidth") as values:
        need_gpu("A rate of the glass card means nothing.")
        peak = copy_bytes_per_s()
        values["copy_gb_per_s"] = peak / 1e9
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for version in range(2):
            model.build(folder / f"v{version}", version)
        starts = {
            part: functools.partial(
                serving,
                folder / "v0",
                log=step.logs / f"{part.replace('/', ' per ')}.log",
                env=_environment(*configuration),
            )
            for part, configuration in CONFIGURATIONS.items()
        }
        with started(starts) as server_of:
            for part in CONFIGURATIONS:
                with step.part(part) as values, server_of(part) as server, _alone(server):
                    _measure(server, folder, values, peak)


def _environment(form: str, pace: int | None) -> dict[str, str]:
    paced = {} if pace is None else {"SGLANG_INFLIGHT_PACE_BYTES_PER_S": str(pace * GIB)}
    return {"SGLANG_INFLIGHT_STAGING": form, **paced}


@contextmanager
def _alone(server: Server) -> Iterator[None]:
    """Halt the server after the block: an idle scheduler keeps a core, and others are measured."""
    yield
    os.killpg(server.process.pid, signal.SIGSTOP)


def _measure(server: Server, folder: Path, values: Values, peak: float | None) -> None:
    versions = itertools.cycle((1, 0))
    # the first two make what later ones find
    receipts = [update(server, folder, next(versions), **LIVE) for _ in range(3)]
    streams = start_streams(server)
    quiet = [_wait(_QUIET_S)]
    windows: list[Window] = []
    receipts = []
    for _ in range(UPDATES):
        begin = time.perf_counter()
        receipts.append(update(server, folder, next(versions), **LIVE))
        windows.append((begin, time.perf_counter()))
        # the gap that the commit makes ends with the next token
        time.sleep(0.1)
    quiet.append(_wait(_QUIET_S))
    running = sum(not stream.has_ended for stream in streams)
    outputs = end_streams(streams)
    if running < len(streams):
        raise AssertionError(f"{len(streams) - running} streams ended while they were measured")
    expect_graphs(server)
    values |= label_values(outputs)
    values |= spread("stall_ms", [receipt["stall_ms"] for receipt in receipts])
    exchanged = _exchanged(receipts[-1])
    if peak is not None and exchanged is not None:
        values["stall_ms_limit"] = exchanged / peak * 1e3
    values["changed_elements"] = receipts[-1]["staged_as"]["changed_elements"]
    values |= _gap_values(streams, windows, quiet)
    values["beside_staging_tokens_per_s"] = tokens_per_s(streams, windows)
    values["beside_staging_tokens_per_s_limit"] = tokens_per_s(streams, quiet)
    values["staged_s"] = statistics.median(receipt["staged_s"] for receipt in receipts)
    values["form"] = receipts[-1]["staged_as"]["form"]


def _wait(seconds: float) -> Window:
    begin = time.perf_counter()
    time.sleep(seconds)
    return begin, time.perf_counter()


def _gap_values(streams: list[Stream], windows: list[Window], quiet: list[Window]) -> Values:
    updated, still = gaps(streams, windows), gaps(streams, quiet)
    return {
        **spread("gap_without_update_ms", still),
        "largest_gap_ms": max(updated),
        "largest_gap_ms_limit": max(still),
    }


def _exchanged(receipt: Values) -> float | None:
    """Return the bytes that the card had to read and write for the commit, at least.

    An exchange with the host's memory has another limit, so it has none here.
    """
    form = receipt["staged_as"]["form"]
    if form == "changes":
        return float(_EXCHANGED_BYTES * receipt["staged_as"]["changed_elements"])
    # both copies are read and written
    return float(4 * receipt["bytes"]) if form == "device" else None


if __name__ == "__main__":
    main("stalls", "Stalls of a commit, and decoding beside staging", PARTS, run)

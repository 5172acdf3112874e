"""The card, and the copy bandwidths that limit everything else."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Callable

import torch

from benchmarks.gpu import card
from benchmarks.gpu.card import need_card
from benchmarks.gpu.exchanges import need_memory
from benchmarks.gpu.step import Step, Values, main, spread, timed

LIMIT_S = 40
RUNS = 20
# bytes of a buffer: two fit into a small card
LARGE = 4 << 30
PINNED = 1 << 30
SMALL = 32 << 20


def run(step: Step) -> None:
    with step.part("card") as values:
        need_card()
        values |= describe()
        values |= describe_driver()
    with step.part("copy") as values:
        within(values, SMALL if step.small else LARGE)
    with step.part("link") as values:
        need_card()
        link(values, SMALL if step.small else PINNED)


def describe() -> Values:
    """Return name and memory of the card, and the versions of torch and its CUDA."""
    found = card.module().get_device_properties(0)
    free, total = card.module().mem_get_info(0)
    return {
        "name": card.name(),
        "capability": f"{found.major}.{found.minor}",
        "processors": found.multi_processor_count,
        "memory_bytes": total,
        "free_bytes": free,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }


def describe_driver() -> Values:
    """Return the driver's version, and the limits of the link and of the power."""
    # a container may lack the program
    if not shutil.which("nvidia-smi"):
        return {}
    names = ("driver_version", "pcie.link.gen.max", "pcie.link.width.max", "power.limit")
    asked = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    keys = ("driver", "pcie_generation", "pcie_lanes", "power_limit")
    return dict(zip(keys, asked.stdout.strip().split(", "), strict=True))


def measure(values: Values, name: str, copy: Callable[[], object], nbytes: int) -> None:
    """Time ``copy``, which moves ``nbytes``, and put its rate into ``values``.

    A rate of the glass card would be taken for a limit, so there is none.
    """
    times = timed(copy, runs=RUNS)
    values |= spread(f"{name}_ms", times)
    values[f"{name}_bytes"] = nbytes
    if not card.is_glass():
        values[f"{name}_bytes_per_s"] = nbytes / statistics.median(times) * 1e3


def within(values: Values, size: int) -> None:
    """Copy ``size`` bytes from one place of the device's memory to another."""
    need_memory(2 * size)
    of, to = (torch.ones(size, dtype=torch.uint8, device=card.device()) for _ in range(2))
    values["device"] = card.device().type
    # each byte is read and written
    measure(values, "copy", lambda: to.copy_(of), 2 * size)


def link(values: Values, size: int) -> None:
    """Copy ``size`` bytes to the card, from it, and both at once."""
    near, far = (torch.ones(size, dtype=torch.uint8, device=card.device()) for _ in range(2))
    sent, got = (torch.ones(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    aside = card.module().Stream()

    def both() -> None:
        here = card.module().current_stream()
        aside.wait_stream(here)
        with card.module().stream(aside):
            got.copy_(far, non_blocking=True)
        near.copy_(sent, non_blocking=True)
        here.wait_stream(aside)

    measure(values, "to_card", lambda: near.copy_(sent, non_blocking=True), size)
    measure(values, "from_card", lambda: got.copy_(far, non_blocking=True), size)
    measure(values, "both_ways", both, 2 * size)


if __name__ == "__main__":
    main("bandwidth", "Copy bandwidths of the card", ("card", "copy", "link"), run)

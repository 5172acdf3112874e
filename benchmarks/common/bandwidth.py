"""Copy bandwidth of the memory: ``python -m benchmarks.common.bandwidth --json FILE``.

An update brings each byte of the weights into memory once, so it takes at least the time of one
copy. The copy uses as many threads as a rank of the servers.
"""

from __future__ import annotations

import json as json_
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from harness.starting import ENV

THREADS = int(ENV["OMP_NUM_THREADS"])
# far beyond the caches of a processor
MEGABYTES = 512
COPIES = 9


def measure(nbytes: int = MEGABYTES << 20, copies: int = COPIES) -> float:
    """Return the bytes that a copy moves in a second: the median of ``copies`` copies.

    Each byte is read once and written once, and counts once.
    """
    torch.set_num_threads(THREADS)
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    seconds = []
    for _ in range(copies):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return nbytes / statistics.median(seconds)


def main(json: Annotated[Path, typer.Option(help="file for the result")]) -> None:
    json.write_text(json_.dumps({"copy_bytes_per_s": measure()}) + "\n")


if __name__ == "__main__":
    typer.run(main)

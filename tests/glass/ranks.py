"""Runs a program on ranks of its own: each a forked process with a card, in one group."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.glass.card import Ended, in_child

# a collective that should not wait, and does, fails its test by then
PATIENCE_S = 20


def on_ranks(
    program: Callable[[int], Any], folder: Path, *, ranks: int = 2, **settings: object
) -> list[Ended]:
    """Run ``program(rank)`` on each rank of a group named ``world``, and return their ends."""
    settings = {"watchdog_s": PATIENCE_S, **settings}

    def enter(rank: int) -> Any:
        dist.init_process_group(
            "glass",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=2 * PATIENCE_S),
        )
        return program(rank)

    # forked by this thread: Python's lock of imports may stop forks of other threads for ever
    results = [
        _begin(functools.partial(enter, rank), folder / f"{rank}", settings)
        for rank in range(ranks)
    ]
    ends: list[Ended] = []
    for child, result in results:
        with os.fdopen(result, "rb") as into:
            ends.append(pickle.loads(into.read()))
        os.waitpid(child, 0)
    return ends


def _begin(call: Callable[[], Any], folder: Path, settings: dict[str, object]) -> tuple[int, int]:
    """Start a process that starts the rank's, and writes its end into the returned pipe."""
    folder.mkdir()
    result, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(result)
            with os.fdopen(write, "wb") as out:
                out.write(pickle.dumps(in_child(call, folder, **settings)))
        finally:
            os._exit(0)
    os.close(write)
    return child, result


def values(ends: list[Ended]) -> list[Any]:
    """Return what each rank's program returned, and raise what one has raised."""
    for rank, ended in enumerate(ends):
        assert not ended.error, f"rank {rank}: {ended.error}"
        assert not ended.signal, f"rank {rank}: signal {ended.signal}: {ended.stderr}"
    return [ended.value for ended in ends]

"""Examples, each run in its own process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.starting import ROOT, end, start

TIMEOUT_S = 800.0


def run(
    folder: Path,
    example: str,
    *arguments: str,
    status: int = 0,
    env: Mapping[str, str] | None = None,
    processes: int | None = None,
) -> list[str]:
    """Run an example to its end, check its exit status, and return the printed lines.

    ``processes``: of ``torchrun``, which starts them on one machine.
    """
    by = ["-m"]
    if processes is not None:
        by = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    log = folder / f"{example}.log"
    with log.open("wb") as sink:
        process = start(
            [*by, f"examples.{example}", *arguments],
            output=sink,
            env=env,
            cwd=ROOT,
            forks_commands=True,
        )
        try:
            ended = process.wait(TIMEOUT_S)
        finally:
            end(process)
    printed = log.read_text()
    assert ended == status, printed
    return printed.splitlines()

"""Runs every step of the kit in turn: ``python -m benchmarks.gpu.run``.

A step has a session of its own and a limit: its module's ``LIMIT_S``, or what is left of the whole
limit, ten minutes on a card. A step that takes longer is killed with every process it has started,
and its file says what it knew by then. The folder then holds one JSON file and one log for each
step, ``machine.json``, and ``page.md``, the page that ``benchmarks.gpu.report`` makes of them.

The exit status is 1 if a part failed. A part that cannot run on this machine is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from benchmarks.common.machine import ROOT
from benchmarks.common.processes import run_limited
from benchmarks.gpu import card, report
from examples.ending import exit_at_sigterm

STEPS = Path(__file__).with_name("steps")
RESULTS = Path(__file__).with_name("results")
MACHINE = "machine.json"
PAGE = "page.md"
# the cheap and fundamental ones first, because a run may be cut short; others come last
ORDER = (
    "bandwidth", "exchange", "host_pinned", "torn", "server", "stalls", "memory", "ipc",
    "finished", "remap",
)  # fmt: skip
WHOLE_LIMIT_S = 600.0
LIMIT_S = 60.0
# a few busy cores start a server much more slowly
WITHOUT_A_GPU = 4
# the commit of a copy without git
COMMIT = "GPU_KIT_COMMIT"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps, write the page, and return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.run", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the results (default: a new one)")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, and without a card")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run these steps alone")
    parser.add_argument(
        "--limit", type=float, default=WHOLE_LIMIT_S, help="seconds of a run on a card"
    )
    parser.add_argument(
        "--publish",
        action="store_true",
        help="put the page of a card into RESULTS.md and the limits",
    )
    options = parser.parse_args(arguments)
    known = steps(STEPS)
    if options.publish and card.is_glass():
        parser.error(f"nothing is published of a {card.NO_GPU}")
    if unknown := set(options.only or ()) - set(known):
        parser.error(f"no step is named {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    folder = (options.out or RESULTS / datetime.now(UTC).strftime("%Y-%m-%dT%H.%M.%S")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    about = describe_machine()
    # without a GPU, sizes of one would take hours
    about["small"] = small = options.small or not report.is_gpu(about)
    (folder / MACHINE).write_text(json.dumps(about, indent=1) + "\n")
    print(f"{about['card'] or 'no card'}; results go to {folder}", flush=True)
    slowly = 1 if report.is_gpu(about) else WITHOUT_A_GPU
    deadline = time.monotonic() + slowly * options.limit
    failed = False
    for name in options.only or known:
        command = [sys.executable, "-m", f"benchmarks.gpu.steps.{name}"]
        limit = min(slowly * limit_of(STEPS / f"{name}.py"), deadline - time.monotonic())
        result = run_step(name, command, folder, limit_s=limit, small=small)
        failed |= has_failed(result)
        # what is known so far is readable while the next step runs
        (folder / PAGE).write_text(report.page(folder))
    if options.publish and report.is_gpu(about):
        report.publish(folder)
    print(f"the page is {folder / PAGE}")
    return int(failed)


def steps(folder: Path) -> list[str]:
    """Return the names of the steps in ``folder``, in the order in which they run."""
    found = {file.stem for file in folder.glob("[!_]*.py")}
    return [name for name in ORDER if name in found] + sorted(found - set(ORDER))


def limit_of(module: Path) -> float:
    """Return the seconds that a step may take; its imports are too slow to ask the module."""
    found = re.search(r"^LIMIT_S = (\d+)", module.read_text(), re.MULTILINE)
    return float(found[1]) if found else LIMIT_S


def run_step(
    name: str, command: Sequence[str], folder: Path, *, limit_s: float, small: bool
) -> dict[str, Any]:
    """Run a step's command, print a line about it, and return the content of its file.

    A step that takes longer than ``limit_s`` seconds is killed with all its processes.
    """
    out = folder / f"{name}.json"
    # a file of an earlier run in this folder would look like this one's
    out.unlink(missing_ok=True)
    begin = time.monotonic()
    cut, code = None, None
    if limit_s < 1:
        cut = "The whole limit was over before this step."
    else:
        arguments = [*command, "--out", str(out), *(["--small"] if small else [])]
        log = folder / f"{name}.log"
        code = run_limited(arguments, log=log, limit_s=limit_s, cwd=ROOT)
        if code is None:
            cut = f"The step was cut after {limit_s:.0f} s."
    result = _read(name, out, code=code, cut=cut)
    result["seconds"] = round(time.monotonic() - begin, 1)
    out.write_text(json.dumps(result, indent=1) + "\n")
    states = Counter(part["state"] for part in result["parts"].values())
    said = ", ".join(f"{states[state]} {state}" for state in ("ran", "failed", "not run"))
    print(f"{name:12} {said}; {result['seconds']:.0f} s. {cut or ''}".rstrip(), flush=True)
    return result


def has_failed(result: dict[str, Any]) -> bool:
    """Return whether a part of a step's file has failed."""
    return any(part["state"] == "failed" for part in result["parts"].values())


def describe_machine() -> dict[str, Any]:
    """Return the card, its driver, and the versions, for ``machine.json``."""
    import torch

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "card": card.name(),
        "is_glass": card.is_glass(),
        "driver": _driver() if card.has_gpu() else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "sglang": machine.version_of("sglang"),
        "triton": machine.version_of("triton"),
        "python": platform.python_version(),
    }


def _read(name: str, out: Path, *, code: int | None, cut: str | None) -> dict[str, Any]:
    if out.exists():
        result: dict[str, Any] = json.loads(out.read_text())
        if code not in (0, None) and not has_failed(result):
            # an error outside of every part
            result["parts"]["the step itself"] = _failed(f"It ended with the status {code}.")
    else:
        result = {"step": name, "title": name, "parts": {}}
        why = cut or f"It ended with the status {code}, and wrote no file."
        result["parts"]["the step itself"] = (
            {**_failed(why), "state": "not run"} if code is None else _failed(why)
        )
    result["cut"] = cut
    return result


def _failed(why: str) -> dict[str, Any]:
    return {"state": "failed", "why": why, "values": {}, "seconds": 0.0}


def _commit() -> str:
    if known := os.environ.get(COMMIT):
        return known
    return machine.commit()


def _driver() -> str:
    query = ("--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return machine.output("nvidia-smi", *query) or "unknown"


if __name__ == "__main__":
    # SIGTERM ends the running step, too
    exit_at_sigterm()
    sys.exit(main())

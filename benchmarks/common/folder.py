"""A folder of results: one JSON file a benchmark, and ``machine.json`` about all of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.machine import describe_machine
from benchmarks.common.report import Report
from benchmarks.plan import PLAN, Planned

MACHINE = "machine.json"


@dataclass(frozen=True)
class Result:
    """A benchmark of a folder, and how it ran. ``report`` is None if it has written none.

    ``run`` says how it ran: date, commit, versions, command, load, seconds, the copy bandwidth in
    bytes per second, which peers were left out, and its state.
    """

    planned: Planned
    run: dict[str, Any]
    report: Report | None

    @property
    def copy_bytes_per_s(self) -> float:
        speed: float = self.run["copy_bytes_per_s"]
        return speed

    def copy_s(self, size: str) -> float | None:
        """Return the seconds of one copy of a model's weights, which no update can be below."""
        known = self.report.facts.get("model_bytes", {}) if self.report else {}
        return known[size] / self.copy_bytes_per_s if size in known else None


@dataclass
class Folder:
    path: Path
    machine: dict[str, Any]
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Folder:
        """Raises ``FileNotFoundError`` for a folder without ``machine.json``."""
        content = json.loads((path / MACHINE).read_text())
        return cls(path, content["machine"], content["runs"])

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Return the folder, made anew if there is none.

        Raises ``ValueError`` if it has results of another machine.
        """
        machine = describe_machine()
        if not (path / MACHINE).exists():
            path.mkdir(parents=True, exist_ok=True)
            return cls(path, machine)
        folder = cls.read(path)
        if folder.machine != machine:
            raise ValueError(
                f"{path} has results of {folder.machine}, and this is {machine}: use another folder"
            )
        return folder

    def file(self, planned: Planned) -> Path:
        return self.path / f"{planned.name}.json"

    def note(self, planned: Planned, run: dict[str, Any]) -> None:
        """Keep how a benchmark ran, in place of its last run."""
        self.runs[planned.name] = run
        content = {"machine": self.machine, "runs": self.runs}
        (self.path / MACHINE).write_text(json.dumps(content, indent=1) + "\n")

    def results(self) -> list[Result]:
        """Return what is known of each benchmark that ran, in the plan's order."""
        return [
            Result(
                planned,
                self.runs[planned.name],
                Report.read(self.file(planned)) if self.file(planned).exists() else None,
            )
            for planned in PLAN
            if planned.name in self.runs
        ]

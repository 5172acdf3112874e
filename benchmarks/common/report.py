"""Medians with their range, as a table and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import scipy.stats
from rich.console import Console
from rich.table import Table

from benchmarks.common import machine

FILE_WIDTH = 160  # width of a table outside a terminal


@dataclass(frozen=True)
class Summary:
    """Summary of one quantity measured several times."""

    median: float
    low: float
    high: float
    p95: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary:
        known = list(values)
        # quantiles needs two values, and a single value is its own percentile
        p95 = statistics.quantiles(known * 2, n=20, method="inclusive")[18]
        return cls(statistics.median(known), min(known), max(known), p95, len(known))

    def show(self) -> str:
        if self.count == 1:
            return _round(self.median)
        return f"{_round(self.median)} ({_round(self.low)} to {_round(self.high)})"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the median's 95 % confidence interval, for any distribution."""
    drawn = scipy.stats.bootstrap(
        (values,), statistics.median, vectorized=False, method="percentile", rng=0
    )
    low, high = drawn.confidence_interval
    return low, high


@dataclass
class Goal:
    """A promised ratio, and the measured value."""

    text: str
    value: float
    is_met: bool


@dataclass
class Report:
    """One benchmark's result. ``rows`` hold the table's cells as numbers, in the columns' order.

    ``facts`` has what a limit or a picture needs beside the rows.
    """

    name: str
    columns: Sequence[str]
    options: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Report:
        """Return the report that ``write`` has put into ``file``."""
        content = json.loads(file.read_text())
        return cls(
            name=content["benchmark"],
            columns=content["columns"],
            options=content["options"],
            rows=[{k: _unplain(v) for k, v in row.items()} for row in content["rows"]],
            goals=[Goal(**goal) for goal in content["goals"]],
            notes=content["notes"],
            facts=content["facts"],
        )

    def add(self, **cells: Any) -> None:
        self.rows.append(cells)

    def goal(
        self,
        text: str,
        value: float,
        *,
        at_most: float = float("inf"),
        at_least: float = float("-inf"),
    ) -> None:
        self.goals.append(Goal(text, value, at_least <= value <= at_most))

    def show(self) -> None:
        console = Console()
        if not console.is_terminal:
            console.width = FILE_WIDTH
        table = Table(title=f"{self.name}: median (min to max)")
        for column in self.columns:
            table.add_column(column)
        for row in self.rows:
            table.add_row(*(cell(value) for value in row.values()))
        console.print(table)
        for goal in self.goals:
            mark = "[green]met[/]" if goal.is_met else "[red]missed[/]"
            console.print(f"{goal.text}: {goal.value:.3g} {mark}")
        for note in self.notes:
            console.print(f"[dim]{note}[/]")

    def write(self, file: Path | None) -> None:
        if file is None:
            return
        content = {
            "benchmark": self.name,
            "versions": machine.versions(),
            "options": self.options,
            "columns": list(self.columns),
            "rows": [{k: _plain(v) for k, v in row.items()} for row in self.rows],
            "goals": [asdict(goal) for goal in self.goals],
            "notes": self.notes,
            "facts": self.facts,
        }
        file.write_text(json.dumps(content, indent=2) + "\n")


def cell(value: Any) -> str:
    """Return the text of a table's cell: three digits, and nothing for None."""
    if isinstance(value, Summary):
        return value.show()
    if isinstance(value, float):
        return _round(value)
    return "" if value is None else str(value)


def _round(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Summary) else value


def _unplain(value: Any) -> Any:
    return Summary(**value) if isinstance(value, dict) else value

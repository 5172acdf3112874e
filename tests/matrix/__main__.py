"""``python -m tests.matrix``: run every cell, and write the table into ``docs/matrix.md``.

``docs/reference/limits.md`` gets the rows of ``IN_LIMITS``, and the table of ``limits.py``.

A cell is a check mark, or the letter of a refusal below the table: the server refused, and its
requests continued. Any other result is a failure: the command exits with 1 and writes nothing.
So is a refusal that is not in the server's ``capabilities``, and a reason there without a refusal.
"""

from __future__ import annotations

import contextlib
import itertools
import string
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import typer
from rich.console import Console

from harness.starting import ROOT
from harness.trainer import Trainers
from tests.matrix import limits
from tests.matrix.columns import (
    COLUMNS,
    ROWS,
    Column,
    Refusal,
    Running,
    restore_servers,
    why_not_run,
)
from tests.matrix.configurations import CONFIGURATIONS, Configuration
from tests.support.load import more_tokens
from tests.support.pair import why_no_pair
from tests.support.updates import Sender

MATRIX = ROOT / "docs" / "matrix.md"
IN_LIMITS = (
    "one rank",
    "`SGLANG_INFLIGHT_STAGING=off`",
    "`--pp-size 2 --tp-size 2`",
    "`--dp-size 2 --tokenizer-worker-num 2`",
    "`--disaggregation-mode prefill` and `decode`, both asked",
)
BEGIN, END = "<!-- make matrix -->\n", "<!-- end -->\n"
DONE = "✓"

console = Console(stderr=True)


class Table:
    """Cells by row. A cell is ``DONE``, or the sentence of a refusal."""

    def __init__(self, rows: dict[str, list[str]] | None = None) -> None:
        self._rows = rows or {}

    def add(self, row: str, cell: str) -> None:
        self._rows.setdefault(row, []).append(cell)

    def only(self, names: Iterable[str]) -> Table:
        return Table({name: self._rows[name] for name in names})

    def write_into(self, document: Path) -> None:
        limits.replace_between(document, BEGIN, END, str(self))

    def __str__(self) -> str:
        """Letters stand for sentences, which follow the table."""
        letters: dict[str, str] = {}
        for cell in itertools.chain.from_iterable(self._rows.values()):
            if cell != DONE and cell not in letters:
                letters[cell] = string.ascii_lowercase[len(letters)]
        lines = [["", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
        lines += [[row, *(letters.get(c, c) for c in cells)] for row, cells in self._rows.items()]
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        notes = "".join(f"- {letter}: {said}\n" for said, letter in letters.items())
        return f"{table}\n{notes}"


def main(only: list[str] | None = None, *, write: bool = True) -> None:
    """Run the cells of all configurations, or of those with one of these words in their name."""
    chosen = [
        each for each in CONFIGURATIONS if not only or any(word in each.name for word in only)
    ]
    if any(each.pair for each in chosen) and (why_not := why_no_pair()):
        sys.exit(why_not)
    table = Table()
    failed = 0
    with tempfile.TemporaryDirectory() as name, contextlib.closing(Trainers()) as trainers:
        folder = Path(name)
        senders: dict[str, Sender] = {}
        for model in {each.model.__name__: each.model for each in chosen}.values():
            checkpoints = folder / model.__name__
            for version in range(2):
                model.build(checkpoints / f"v{version}", version)
            senders[model.__name__] = Sender(checkpoints, checkpoints, trainers, model)
        for number, configuration in enumerate(chosen):
            name_of_model = configuration.model.__name__
            logs = folder / str(number)
            logs.mkdir()
            for column, said in _run(
                configuration, folder / name_of_model, logs, senders[name_of_model]
            ):
                console.print(f"{configuration.name}, {column}: {said or 'FAILED'}")
                failed += said is None
                table.add(configuration.name, said or "FAILED")
    print(table)
    if failed:
        sys.exit(f"{failed} cells failed")
    if write and not only:
        table.write_into(MATRIX)
        table.only(IN_LIMITS).write_into(limits.PAGE)
        limits.write_into_page()


def _run(
    configuration: Configuration, checkpoints: Path, logs: Path, sender: Sender
) -> Iterator[tuple[str, str | None]]:
    """Yield each column and its result, or None for a failure."""
    with contextlib.ExitStack() as stack:
        running: Running | None = None
        for column, do in COLUMNS.items():
            said = why_not_run(configuration, column)
            if said is None:
                try:
                    if running is None:
                        started = configuration.run(checkpoints / "v0", logs)
                        running = Running(*stack.enter_context(started), configuration, sender)
                    said = _try(running, do)
                    if (row := ROWS.get(column)) is not None:
                        why = running.why_not(row)
                        assert (said == DONE) == (why is None), f"{said!r}, and {row} is {why!r}"
                    restore_servers(running)
                except Exception:
                    console.print(traceback.format_exc(), markup=False)
                    said = None
                    # the next cell starts with a fresh server
                    stack.close()
                    running = None
            yield column, said


def _try(the: Running, do: Column) -> str:
    try:
        do(the)
    except Refusal as refusal:
        # there may be a pause from before the refusal
        the.ask("/continue_generation")
        more_tokens(the.streams)
        the.end()
        return str(refusal)
    return DONE


if __name__ == "__main__":
    typer.run(main)

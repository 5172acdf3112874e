"""Output of the commands: JSON, tables, and a bar while a server stages.

Imports rich only for drawing, because its import is slow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sglang_inflight.client import Progress
from sglang_inflight.client.fields import OnProgress
from sglang_inflight.vocabulary.answers import Answer

if TYPE_CHECKING:
    from rich.table import Table

WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def print_json(answer: Answer | dict[str, Any], *, indent: int | None = 2) -> None:
    content = answer.as_json() if isinstance(answer, Answer) else answer
    typer.echo(json.dumps(content, indent=indent))


def start_table(*heads: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for head in heads:
        table.add_column(head, overflow="fold")
    return table


def print_table(table: Table) -> None:
    from rich.console import Console

    Console().print(table)


@contextmanager
def staging_bar(model_path: str, *, hidden: bool) -> Iterator[OnProgress]:
    """Yield a progress callback for the client. Draws nothing if stderr is no terminal."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    with progress.Progress(
        progress.TextColumn("staging {task.fields[name]}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=hidden or not console.is_terminal,
    ) as bar:
        folder = Path(model_path)
        task = bar.add_task("", total=_measure(folder), name=folder.name)

        def show(staged: Progress) -> None:
            bar.update(task, completed=staged.bytes)

        yield show


def _measure(folder: Path) -> int | None:
    """Return the bytes of a checkpoint, or None if only the server can see its folder."""
    for pattern in WEIGHTS:
        if size := sum(file.stat().st_size for file in folder.glob(pattern)):
            return size
    return None

"""Tables on the terminal. Imports rich only for drawing, because its import is slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


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

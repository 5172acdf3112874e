"""``sglang-inflight``: what to ask, and what to build, outside a running server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from sglang_inflight.doctor import Report

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _commands() -> None:
    """Change a language model's weights while SGLang is generating with it."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Say whether a patched server would start here. Exit code 1: it would refuse to."""
    from sglang_inflight.doctor import report

    found = report()
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2, default=str))
    else:
        _show(found)
    raise typer.Exit(0 if found.healthy else 1)


@app.command()
def fork(
    destination: Annotated[Path, typer.Argument(metavar="DIR", help="An empty or new folder.")],
) -> None:
    """Write a copy of the installed SGLang with the patches in it to DIR/sglang."""
    from sglang_inflight.fork import write_fork

    try:
        functions = write_fork(destination)
    except OSError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{destination / 'sglang'}: {len(functions)} functions patched")


def _show(report: Report) -> None:
    from rich.console import Console

    console = Console()
    facts = _table("fact", "value")
    for name, value in report.versions.items():
        facts.add_row(name, value)
    facts.add_row("platform", report.platform or "none")
    facts.add_row("patches", report.series or "none")
    for name, value in report.settings.items():
        facts.add_row(name, str(value))
    console.print(facts)

    if report.functions:
        patched = _table("function", "patches", "state")
        for function in report.functions:
            state = "already applied (fork)" if function.in_fork else "applies"
            names = "\n".join(name.removesuffix(".patch") for name in function.patches)
            patched.add_row(function.qualname, names, state)
        console.print(patched)
    for problem in report.problems:
        console.print(problem, style="bold red", markup=False)


def _table(*heads: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for head in heads:
        table.add_column(head, overflow="fold")
    return table

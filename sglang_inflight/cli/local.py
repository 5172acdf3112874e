"""Commands that need no running server."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

# entry points of commands that another distribution brings
COMMANDS = "sglang_inflight.commands"


def doctor(
    server_flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- FLAG...]", help="Flags of `sglang serve`: check them, too."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Say whether a patched server would start here. Exit code 1: it would not."""
    installed = entry_points(group=COMMANDS, name="doctor")
    if not installed:
        typer.echo(
            "The doctor is in the distribution sglang-inflight-tools, which is not installed: "
            "pip install ./tools in the repository of sglang-inflight",
            err=True,
        )
        raise typer.Exit(2)
    (command,) = installed
    raise typer.Exit(command.load()(server_flags or [], as_json=as_json))


def fork(
    destination: Annotated[Path, typer.Argument(metavar="DIR", help="An empty or new folder.")],
) -> None:
    """Write a patched copy of the installed SGLang to DIR/sglang."""
    try:
        from sglang_inflight.livepatch import write_fork
    except ImportError as error:
        typer.echo(f"A fork needs the server's distribution, sglang-inflight: {error}", err=True)
        raise typer.Exit(2) from error
    try:
        functions = write_fork(destination)
    except OSError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{destination / 'sglang'}: {len(functions)} functions patched")

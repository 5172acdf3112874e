"""The command for a fleet: shows each server's version, and updates servers that are behind.

Exit codes are those of ``remote.py``: 4 if a server could not be brought, 5 if one was not reached.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_inflight.cli.output import print_json, print_table, start_table
from sglang_inflight.cli.remote import ApiKey, AsJson, exit_codes, until_ctrl_c
from sglang_inflight.client import Fleet
from sglang_inflight.vocabulary.errors import InflightError

if TYPE_CHECKING:
    from rich.table import Table

    from sglang_inflight.client.report import Report
    from sglang_inflight.client.returning import CaughtUp, FleetTable, Row

_DONE_IN_PART, _NOT_REACHED = 4, 5
_SHOWN_DIGITS = 8


def fleet(
    urls: Annotated[list[str], typer.Option("--url", help="URL of a server; once for each.")],
    catch_up: Annotated[
        bool,
        typer.Option(
            "--catch-up", help="Bring servers that are behind, from others over the network."
        ),
    ] = False,
    folder: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="With --catch-up: by way of this folder instead, which all servers see.",
        ),
    ] = None,
    weight_version: Annotated[
        str | None,
        typer.Option(
            help="The fleet's version. Default: the one of more than half of the servers."
        ),
    ] = None,
    watch: Annotated[
        float | None,
        typer.Option(min=0.05, metavar="SECONDS", help="Do it again and again until Ctrl-C."),
    ] = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show what the servers of a fleet serve, and bring those that are behind.

    No trainer is needed: a server that serves the fleet's version sends it, and the others load it.
    """
    if folder is not None and not catch_up:
        raise typer.BadParameter("--folder needs --catch-up")

    def once(servers: Fleet) -> int:
        report = None
        if catch_up:
            report = servers.catch_up(folder, weight_version=weight_version)
        return _show(servers, report, weight_version, as_json=as_json)

    with exit_codes(", ".join(urls)), Fleet(urls, api_key=api_key) as servers:
        if watch is None:
            raise typer.Exit(once(servers))
        with until_ctrl_c():
            while True:
                with _going_on():
                    once(servers)
                time.sleep(watch)


@contextmanager
def _going_on() -> Iterator[None]:
    """Print an error and go on: the next look may find another state."""
    try:
        yield
    except InflightError as error:
        typer.echo(str(error), err=True)


def _show(
    servers: Fleet, report: Report[CaughtUp] | None, version: str | None, *, as_json: bool
) -> int:
    """Print the table, and what was done. Return the exit code."""
    table = servers.table(weight_version=version)
    if as_json:
        print_json(table, indent=None)
    else:
        print_table(_draw(table))
    if table.why_unclear is not None:
        typer.echo(table.why_unclear, err=True)
    if report is not None:
        _say_what_was_done(report)
    silent = [row.url for row in table.rows if row.weight_version is None]
    if report is not None and report.failures.keys() - silent:
        return _DONE_IN_PART
    return _NOT_REACHED if silent else 0


def _say_what_was_done(report: Report[CaughtUp]) -> None:
    for url, done in report.answers.items():
        if done.peer is not None:
            typer.echo(f"{url}: brought to {done.weight_version} from {done.peer}", err=True)
    for url, error in report.failures.items():
        typer.echo(f"{url}: {error or type(error).__name__}", err=True)


def _draw(fleet_table: FleetTable) -> Table:
    table = start_table(
        "url", "role", "ready", "state", "version", "epoch", "digest", "behind", "why not ready"
    )
    for row in fleet_table.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    known = {True: "yes", False: "no", None: "?"}
    return [
        row.url,
        row.role or "?",
        known[row.ready],
        row.state or "?",
        row.weight_version or "?",
        "?" if row.epoch is None else str(row.epoch),
        (row.digest or "-")[:_SHOWN_DIGITS],
        known[row.behind],
        row.why or "",
    ]

"""``sglang-inflight timeline``: a running server, drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sglang_inflight.cli.connection import (
    LOCAL,
    ApiKey,
    AsJson,
    Url,
    connect,
    print_json,
    until_ctrl_c,
)
from sglang_inflight.cli.recording import Recording

FORMATS = (".html", ".png", ".svg")

Draw = Callable[[Recording, Path], None]


def _to_be_drawn(file: Path) -> Path:
    if file.suffix not in FORMATS:
        raise typer.BadParameter(f"{file.name} ends in none of {', '.join(FORMATS)}")
    if not file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {file.parent}")
    return file


def timeline(
    file: Annotated[
        Path,
        typer.Argument(metavar="OUT", callback=_to_be_drawn, help="Ends in .html, .png or .svg."),
    ],
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="How long; until Ctrl-C if left out.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 0.25,
    url: Url = LOCAL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Watch a server, and draw throughput, pauses, staging and commits over time.

    What is shorter than the time between two looks may be missed. With --json, the looks
    are printed as well.
    """
    draw = _load_chart()
    recording = Recording()
    try:
        with connect(url, api_key) as client, until_ctrl_c():
            recording.watch(client, every, seconds)
    finally:
        # also what was seen of a server that has gone
        if recording.samples:
            draw(recording, file)
    if not recording.samples:
        typer.echo("it ended before the first look", err=True)
        raise typer.Exit(1)
    if as_json:
        samples = [asdict(sample) for sample in recording.samples]
        print_json({"file": str(file), "samples": samples})
        return
    paused_s = sum(end - begin for begin, end in recording.pauses)
    typer.echo(
        f"{file}: {recording.samples[-1].at:.1f} s, {len(recording.changes)} changes of "
        f"weights, paused {len(recording.pauses)} times for {paused_s:.2f} s"
    )


def _load_chart() -> Draw:
    try:
        from sglang_inflight.cli.chart import draw
    except ModuleNotFoundError as error:
        typer.echo(
            f"drawing needs {error.name}: pip install 'sglang-inflight[cli-plots]'", err=True
        )
        raise typer.Exit(1) from error
    return draw

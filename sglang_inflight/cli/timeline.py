"""``sglang-inflight timeline``: draw a running server over time."""

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
        raise typer.BadParameter(f"{file.name} must end in one of {', '.join(FORMATS)}")
    if not file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {file.parent}")
    return file


def timeline(
    file: Annotated[
        Path,
        typer.Argument(metavar="OUT", callback=_to_be_drawn, help="Ends in .html, .png or .svg."),
    ],
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Duration; until Ctrl-C if left out.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two samples.")] = 0.25,
    url: Url = LOCAL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Watch a server, and draw throughput, pauses, staging and commits over time.

    Events shorter than the time between two samples may be missed. With --json, print the samples,
    too.
    """
    draw = _load_chart()
    recording = Recording()
    try:
        with connect(url, api_key) as client, until_ctrl_c():
            recording.watch(client, every, seconds)
    finally:
        # also after the server has gone
        if recording.samples:
            draw(recording, file)
    if not recording.samples:
        typer.echo("the recording ended before the first sample", err=True)
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

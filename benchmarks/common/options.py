"""Common command-line options of the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.trainer import Transport

Json = Annotated[Path | None, typer.Option("--json", help="also write the result to this file")]
Rounds = Annotated[
    int, typer.Option(min=1, help="how often each server is started, one after the other")
]
Size = Annotated[
    str,
    typer.Option(
        help="model: smollm2, tiny, tiny-even, 135m, 135m-even, 500m, 1.5b, experts-1k, "
        "experts-20k, experts-140k"
    ),
]
Way = Annotated[Transport | None, typer.Option(help="send weights in this way only")]
Sizes = Annotated[str, typer.Option(help="models, smallest first, with commas between")]
Streams = Annotated[int, typer.Option(min=1, help="requests that run at a time")]

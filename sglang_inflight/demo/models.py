"""Building the demo's checkpoints with something to look at meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

from sglang_inflight.demo.smollm2 import build_base, build_corpus, build_styled
from sglang_inflight.demo.styles import HEADLINE, VERSE, Style


class Models(NamedTuple):
    base: Path
    headline: Path
    verse: Path


def build_models(console: Console, cache: Path) -> Models:
    with Progress(
        SpinnerColumn(), *Progress.get_default_columns()[:2], TimeElapsedColumn(), console=console
    ) as progress:
        task = progress.add_task("base model", total=None)
        base = build_base(cache)
        progress.update(task, total=1, completed=1)

        task = progress.add_task("training stories, told by it", total=None)
        build_corpus(base, cache)
        progress.update(task, total=1, completed=1)

        return Models(
            base,
            headline=_build_styled(progress, HEADLINE, base, cache),
            verse=_build_styled(progress, VERSE, base, cache),
        )


def _build_styled(progress: Progress, style: Style, base: Path, cache: Path) -> Path:
    task = progress.add_task(f"version that writes in {style.name} style", total=None)

    def on_step(done: int, of: int) -> None:
        progress.update(task, total=of, completed=done)

    path = build_styled(style, base, cache, on_step)
    progress.update(task, total=1, completed=1)
    return path

"""A bar on the terminal while a server stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_inflight.client import Progress
from sglang_inflight.client.progress import OnProgress

WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


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

        def show(heard: Progress) -> None:
            bar.update(task, completed=heard.bytes)

        yield show


def _measure(folder: Path) -> int | None:
    """Return the bytes of a checkpoint, or None if only the server can see its folder."""
    for pattern in WEIGHTS:
        if size := sum(file.stat().st_size for file in folder.glob(pattern)):
            return size
    return None

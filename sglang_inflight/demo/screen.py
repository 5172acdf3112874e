"""What one sees while the show goes on: the stories grow, and the weights come in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from sglang_inflight.demo.play import Act, Performance
from sglang_inflight.demo.stories import Shelf

TAIL_TOKENS = 24
TAIL_CHARACTERS = 48


class LiveScreen:
    def __init__(
        self,
        progress: Progress,
        stories: Sequence[TaskID],
        *,
        update_bytes: int,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._progress = progress
        self._stories = stories
        self._updates: dict[str, TaskID] = {}
        self._update_bytes = update_bytes
        self._decode = decode

    def show_stories(self, shelf: Shelf) -> None:
        for task, story in zip(self._stories, shelf.stories, strict=True):
            tail = " ".join(self._decode(story.ids[-TAIL_TOKENS:]).split())[-TAIL_CHARACTERS:]
            self._progress.update(
                task, completed=len(story.ids), description=f"[dim]…{escape(tail)}"
            )

    def begin(self, act: Act) -> None:
        self._updates[act.version] = self._progress.add_task(
            f"[bold]{act.version} {act.name}", total=self._update_bytes, unit="bytes staged"
        )

    def show_staged(self, act: Act, nbytes: int) -> None:
        self._progress.update(self._updates[act.version], completed=nbytes)

    def end(self, performance: Performance) -> None:
        task = self._updates[performance.act.version]
        if performance.receipt["success"]:
            self._progress.update(task, completed=self._update_bytes, unit="committed")
        else:
            self._progress.update(task, unit="[red]failed")


@contextmanager
def live_screen(
    console: Console,
    stories: int,
    tokens: int,
    *,
    update_bytes: int,
    decode: Callable[[list[int]], str],
) -> Iterator[LiveScreen]:
    columns = (
        TextColumn("{task.description}", justify="right"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}% {task.fields[unit]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        tasks = [progress.add_task("…", total=tokens, unit="tokens") for _ in range(stories)]
        yield LiveScreen(progress, tasks, update_bytes=update_bytes, decode=decode)

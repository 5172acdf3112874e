"""The live screen: models are built, stories grow, weights arrive.

The screen fits a terminal of 80 columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from examples.stories.streams import Streams
from examples.stories.updating import Update, UpdateResult

TAIL_TOKENS = 24
WIDTH = 42
BAR = 12


class LiveScreen:
    """Milestones are lines that stay. Progress has a bar below the lines."""

    def __init__(self, progress: Progress, started: float) -> None:
        self._progress = progress
        self._started = started
        self._bars: dict[str, TaskID] = {}
        self._stories_began = False
        self._decode: Callable[[list[int]], str] = str
        self._update_bytes = 1

    def say(self, milestone: str) -> None:
        minutes, seconds = divmod(round(time.monotonic() - self._started), 60)
        self._progress.console.print(
            f"[dim]{minutes}:{seconds:02d}[/] {milestone}", highlight=False, soft_wrap=True
        )

    def show_built(self, name: str, done: int, of: int) -> None:
        title = "base model" if name == "base" else f"training on {name} style"
        if done == of:
            self._remove(name)
            self.say("the base model is there" if name == "base" else f"{name} style is learned")
        else:
            self._show(name, title, done, of, f"of {of} steps")

    def expect_stories(self, decode: Callable[[list[int]], str], *, update_bytes: int) -> None:
        self._decode, self._update_bytes = decode, update_bytes

    def show_stories(self, streams: Streams) -> None:
        if not self._stories_began and streams.slowest:
            self._stories_began = True
            self.say("all four stories have begun")
        for number, story in enumerate(streams.stories):
            tail = " ".join(self._decode(story.ids[-TAIL_TOKENS:]).split())[1 - WIDTH :]
            title = f"[dim]…{escape(tail)}"
            self._show(f"story {number}", title, len(story.ids), streams.tokens, "tokens")

    def wait_for(self, update: Update) -> None:
        self.say(f"the stories are paused until {update.version} ({update.name}) is ready")

    def begin(self, update: Update) -> None:
        self.say(f"{update.version} comes {update.name}, while the stories go on")
        self.show_staged(update, 0)

    def show_staged(self, update: Update, nbytes: int) -> None:
        title = f"{update.version} {update.name}"
        self._show(update.version, title, nbytes, self._update_bytes, "staged")

    def end(self, result: UpdateResult) -> None:
        update, receipt = result.update, result.receipt
        self._remove(update.version)
        if receipt["success"]:
            self.say(f"{update.version} is committed, in all stories at once")
        else:
            self.say(f"[bold red]{update.version} failed:[/] {escape(str(receipt['message']))}")

    def _show(self, key: str, title: str, completed: int, total: int, unit: str) -> None:
        if key not in self._bars:
            self._bars[key] = self._progress.add_task(title, unit=unit)
        self._progress.update(self._bars[key], description=title, completed=completed, total=total)

    def _remove(self, key: str) -> None:
        if key in self._bars:
            self._progress.remove_task(self._bars.pop(key))


@contextmanager
def live_screen(console: Console) -> Iterator[LiveScreen]:
    columns = (
        TextColumn("{task.description}", justify="right"),
        BarColumn(BAR),
        TextColumn("{task.percentage:>3.0f}% {task.fields[unit]}"),
    )
    started = time.monotonic()
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        yield LiveScreen(progress, started)

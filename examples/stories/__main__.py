"""``python -m examples.stories``: exit with 0 only if every check passed."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from examples.ending import exit_at_sigterm
from examples.stories.models import BuildFailed
from examples.stories.report import (
    colour_versions,
    show_checks,
    show_receipts,
    show_stories,
    tell_patches,
)
from examples.stories.run import BASE_VERSION, run
from examples.stories.server import ServerFailed
from examples.stories.trainer_process import TrainerFailed
from sglang_inflight.cache import default_cache


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    exit_at_sigterm()
    console = Console()
    logs = options.logs or Path(tempfile.mkdtemp(prefix="sglang-inflight-demo-"))
    logs.mkdir(parents=True, exist_ok=True)
    failed = False
    try:
        outcome = asyncio.run(run(console, options.cache, tokens=options.tokens, logs=logs))
    except* (BuildFailed, ServerFailed, TrainerFailed) as failures:
        for failure in failures.exceptions:
            console.print(f"[bold red]✗[/] {failure}\nLogs: {logs}")
        failed = True
    if failed:
        return 1

    results = outcome.results
    colours = colour_versions([BASE_VERSION, *(result.update.version for result in results)])
    show_stories(console, outcome.stories, colours, outcome.decode)
    show_receipts(console, results, outcome.stories, colours)
    tell_patches(console, results)
    show_checks(console, outcome.checks)
    console.print(f"Logs: {logs}")
    return 0 if all(check.holds for check in outcome.checks) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.stories",
        description="Four stories, told while the weights of their model change four times.",
    )
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where models go")
    parser.add_argument("--logs", type=Path, help="folder for logs (default: a new one)")
    parser.add_argument(
        "--tokens", type=int, help="length of each story (default: what the updates need)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

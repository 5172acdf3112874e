"""``python -m examples.async_grpo``: train by each way of updating, and write a page about it."""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from anyio.from_thread import start_blocking_portal
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from examples.async_grpo.model import TEACHING_STEPS, base_model
from examples.async_grpo.report import make_table, show_table, write_report
from examples.async_grpo.rollouts import STREAM_INTERVAL
from examples.async_grpo.run import Result, Settings, run
from examples.async_grpo.ways import WAYS, keeping_kv
from examples.ending import exit_at_sigterm
from examples.stories.server import ServerFailed, start_server
from sglang_inflight.cache import default_cache

# server and trainer have one of two cores each
THREADS = 1
SERVER = (
    *("--skip-tokenizer-init", "--enable-metrics", "--dtype", "float32"),
    *("--incremental-streaming-output", "--stream-interval", str(STREAM_INTERVAL)),
    *("--max-running-requests", "96", "--max-total-tokens", "32768"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    exit_at_sigterm()
    console = Console()
    settings = replace(
        Settings(),
        seconds=options.seconds,
        steps=options.steps,
        groups=options.groups,
        group_size=options.group_size,
        running=2 * options.groups,
        sharded=options.sharded,
        turns=options.turns,
        replays=options.replays,
    )
    torch.set_num_threads(THREADS)
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    logs = Path(tempfile.mkdtemp(prefix="sglang-inflight-rl-"))
    try:
        results = _run_all(options, settings, console, logs)
    except ServerFailed as failure:
        console.print(f"[bold red]✗[/] {failure}")
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; the server has ended.")
        return 128 + signal.SIGINT
    page = write_report(options.out, results, settings)
    show_table(console, make_table(results))
    console.print(f"The page: {page}\nLogs: {logs}", highlight=False)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [way.name for way in WAYS]
    parser = argparse.ArgumentParser(
        prog="python -m examples.async_grpo",
        description="Train a small model by GRPO, by five ways of updating the server's weights.",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=Settings.seconds, help="training time of each run"
    )
    parser.add_argument(
        "--steps", type=_count, default=Settings.steps, help="end each run after so many steps"
    )
    parser.add_argument(
        "--groups", type=_count, default=Settings.groups, help="questions of a step"
    )
    parser.add_argument(
        "--group-size", type=_count, default=Settings.group_size, help="answers to a question"
    )
    parser.add_argument("--seeds", type=_count, default=1, help="runs of each way")
    parser.add_argument(
        "--way", action="append", choices=names, metavar="WAY", help=f"one of: {'; '.join(names)}"
    )
    parser.add_argument(
        "--sharded", action="store_true", help="send as a sharded trainer does; not the sparse way"
    )
    parser.add_argument(
        "--turns", type=_count, default=Settings.turns, help="questions of a conversation"
    )
    parser.add_argument(
        "--kv-max-age",
        type=_age,
        action="append",
        default=[],
        metavar="AGE",
        help="run in flight with KV of at most this many versions; any: of any age",
    )
    parser.add_argument(
        "--replays", type=int, default=10, help="answers of each run that are made again"
    )
    parser.add_argument(
        "--teaching", type=_count, default=TEACHING_STEPS, help="steps that make the base model"
    )
    parser.add_argument("--cache", type=Path, default=default_cache(), help="for the base model")
    parser.add_argument("--out", type=Path, default=Path("rl-results"), help="folder of the page")
    options = parser.parse_args(arguments)
    if wrong := {*(options.way or [])} - {*_names(options)}:
        parser.error(f"changed elements are not sent with --sharded: {'; '.join(sorted(wrong))}")
    return options


def _names(options: argparse.Namespace) -> list[str]:
    """Return the names of the ways that the options allow."""
    return [way.name for way in WAYS if not (options.sharded and way.sparse)]


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no positive number of seconds")
    return value


def _age(text: str) -> int | None:
    return None if text == "any" else int(text)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _run_all(
    options: argparse.Namespace, settings: Settings, console: Console, logs: Path
) -> list[Result]:
    """Run each way for each seed on one server. Ways take turns, so that noise meets them all."""
    aged = [keeping_kv(most) for most in options.kv_max_age]
    named = options.way or ([] if aged else _names(options))
    ways = [*(way for way in WAYS if way.name in named), *aged]
    options.out.mkdir(parents=True, exist_ok=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(24),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    results: list[Result] = []
    with (
        Progress(*columns, console=console) as progress,
        start_blocking_portal() as portal,
        (options.out / "runs.jsonl").open("w") as file,
    ):

        def show(bar: Any, done: float, of: float) -> None:
            progress.update(bar, completed=done, total=of)

        bar = progress.add_task("a base model is taught", total=1)
        base = base_model(
            options.cache, functools.partial(show, bar), steps=options.teaching, turns=options.turns
        )
        show(bar, 1, 1)
        served = start_server(
            base.folder,
            name="model",
            version="0",
            log=logs / "server.log",
            more=SERVER,
            env={"SGLANG_INFLIGHT_REPLAY": "1"},
        )
        with portal.wrap_async_context_manager(served) as server:
            for seed in range(options.seeds):
                for way in ways:
                    bar = progress.add_task(f"{way.name}, seed {seed}", total=settings.seconds)
                    on_progress = functools.partial(show, bar, of=settings.seconds)
                    results.append(
                        run(
                            *(way, server.url, base.model, settings),
                            seed=seed,
                            on_progress=on_progress,
                        )
                    )
                    # what is measured stays if a later run fails
                    file.write(json.dumps(results[-1].as_json()) + "\n")
                    file.flush()
    return results


if __name__ == "__main__":
    sys.exit(main())

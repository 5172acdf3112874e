"""``sglang-inflight replay``: make recorded rollouts again, and compare."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_inflight.cli.output import print_table, start_table
from sglang_inflight.cli.remote import ApiKey, exit_codes
from sglang_inflight.extensions.replay.examine import Report, examine
from sglang_inflight.extensions.replay.play import Stage, checkpoint_of
from sglang_inflight.extensions.replay.rollout import Rollout, read_json, read_rollouts
from sglang_inflight.extensions.replay.start import arguments_of, environment_of, started
from sglang_inflight.vocabulary.errors import Refused

DIFFERENT = 1


def replay(
    paths: Annotated[
        list[Path], typer.Argument(help="Answers with records: files of JSON, or folders.")
    ],
    checkpoint: Annotated[
        list[str] | None, typer.Option(help="VERSION=FOLDER of each version, on the server.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="A server with SGLANG_INFLIGHT_REPLAY=1. Without it one is started."),
    ] = None,
    api_key: ApiKey = None,
    under: Annotated[
        list[str] | None, typer.Option(help="Also give the tokens' log probabilities under it.")
    ] = None,
    trainer: Annotated[
        Path | None,
        typer.Option(help="JSON: a trainer's log probabilities, a list for each rollout."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Nats by which log probabilities may differ.")
    ] = 0.0,
    server_args: Annotated[
        str, typer.Option(help="More arguments for a server that is started.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON a rollout.")
    ] = False,
) -> None:
    """Make recorded rollouts again, with the commits at the same tokens, and compare.

    Exit codes: 0 all are equal; 1 some differ, or something was refused.
    """
    with exit_codes(url or "the started server"):
        checkpoints = read_checkpoints(checkpoint or [])
        rollouts = [rollout for path in paths for rollout in read_rollouts(path)]
        trained = None if trainer is None else read_logprobs(trainer, rollouts)
        found = []
        with _bar(len(rollouts)) as advance:
            for stage, group in stages(rollouts, checkpoints, url, api_key, server_args):
                for rollout in group:
                    report = examine(stage, rollout, under or [], tolerance)
                    if trained is not None:
                        report.add("trainer", rollout, trained[rollout.name])
                    found.append(report)
                    advance()
    if as_json:
        for report in found:
            typer.echo(json.dumps(report.as_json()))
    else:
        _show(found)
    if not all(report.verdict.is_equal for report in found):
        raise typer.Exit(DIFFERENT)


def stages(
    rollouts: Sequence[Rollout],
    checkpoints: Mapping[str, str],
    url: str | None,
    api_key: str | None,
    server_args: str,
) -> Iterator[tuple[Stage, list[Rollout]]]:
    """Yield servers with the rollouts to repeat there: the one at ``url``, or started ones.

    Rollouts of servers with equal arguments share one that is started.
    """
    if url is not None:
        with Stage(url, checkpoints, api_key=api_key) as stage:
            yield stage, list(rollouts)
        return
    for (arguments, environment), of_kind in itertools.groupby(
        sorted(rollouts, key=_kind), key=_kind
    ):
        group = list(of_kind)
        record = group[0].record
        version = record.version(record.epoch)
        folder = checkpoint_of(checkpoints, version)
        given = [*arguments, *shlex.split(server_args)]
        with (
            started(folder, version, given, dict(environment)) as at,
            Stage(at, checkpoints) as stage,
        ):
            yield stage, group


def _kind(rollout: Rollout) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return arguments and environment of the server that made the rollout."""
    server = rollout.record.server
    return arguments_of(server), tuple(sorted(environment_of(server).items()))


def read_checkpoints(given: Sequence[str]) -> dict[str, str]:
    """Read ``VERSION=FOLDER``. Raises ``Refused`` for anything else."""
    found = {}
    for each in given:
        version, equals, folder = each.partition("=")
        if not (version and equals and folder):
            raise Refused(f"--checkpoint must be VERSION=FOLDER; got {each!r}")
        found[version] = folder
    return found


def read_logprobs(path: Path, rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Read a trainer's log probabilities: a list for each rollout, or an object by their names."""
    items = read_json(path)
    content = items if path.suffix == ".jsonl" else items[0]
    if isinstance(content, list):
        if len(content) != len(rollouts):
            raise Refused(f"{path} has {len(content)} lists, for {len(rollouts)} rollouts")
        content = {rollout.name: of for rollout, of in zip(rollouts, content, strict=True)}
    for rollout in rollouts:
        of = content.get(rollout.name)
        if not isinstance(of, list) or len(of) != len(rollout.tokens):
            raise Refused(
                f"{path} needs {len(rollout.tokens)} log probabilities for {rollout.name}"
            )
    return dict(content)


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("replaying", total=total)
        yield lambda: bar.advance(task)


def _show(found: Sequence[Report]) -> None:
    table = start_table("rollout", "tokens", "commits", "retractions", "verdict")
    for report in found:
        verdict = report.verdict
        table.add_row(
            verdict.name,
            str(verdict.tokens),
            str(verdict.commits),
            str(verdict.retractions),
            str(verdict),
        )
    print_table(table)
    rows = [
        (report.verdict.name, name, each)
        for report in found
        for name, of in report.mismatches.items()
        for each in of
    ]
    if not rows:
        return
    table = start_table("rollout", "made by", "tokens", "compared with", "mean", "most", "variance")
    for rollout, name, each in rows:
        numbers = (each.mean, each.largest, each.ratio_variance)
        table.add_row(
            rollout, each.version, str(each.tokens), name, *(f"{number:.2g}" for number in numbers)
        )
    print_table(table)

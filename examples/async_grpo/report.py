"""A report of the runs: numbers in JSON, a table, pictures, and one page that opens alone."""

from __future__ import annotations

import base64
import html
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from examples.async_grpo.run import Result, Settings
from examples.async_grpo.ways import WAYS

# the way that all others are compared with
CONTROL = WAYS[0].name
REWARD = 0.7
# Okabe and Ito's colours, told apart by colour-blind readers, too
OTHER = "#009e73"
COLOURS = dict(
    zip((way.name for way in WAYS), ("#555555", "#d55e00", "#e69f00", "#0072b2", "#56b4e9"),
        strict=True)
)  # fmt: skip
HEADS = (
    "way", f"time to reward {REWARD}", "faster than blocking", "reward at the end",
    "steps", "tokens made", "thrown away", "too old", "recomputed",
    "versions behind", "stood still",
    "logprobs off by", "mislabelled", "labels one off would show in", "off fresh KV's, mean",
    "made again, equal",
)  # fmt: skip


class Picture(NamedTuple):
    title: str
    file: Path


class Row(NamedTuple):
    """A way's line of the table. Times are seconds, counts are means over the way's runs.

    ``times`` has a run's time to ``REWARD``, or None. ``ratios`` has the control's time over it,
    for each seed of which both reached it.
    """

    way: str
    times: list[float | None]
    ratios: list[float]
    last: list[float]
    steps: float
    made: float
    thrown_away: float
    too_old: float
    recomputed: float
    behind: float
    still: float
    largest: float
    mislabelled: int
    checked: int
    noticeable: int
    off_fresh: float
    replayed: int
    replayed_equal: int


def time_to(curve: Sequence[tuple[float, int, float]], reward: float) -> float | None:
    """Return the second in which ``curve`` first reaches ``reward``, or None.

    Between two evaluations the curve is a line.
    """
    if curve and curve[0][2] >= reward:
        return curve[0][0]
    for (t0, _, r0), (t1, _, r1) in pairwise(curve):
        if r1 >= reward:
            return t0 + (t1 - t0) * (reward - r0) / (r1 - r0)
    return None


def make_table(results: Sequence[Result]) -> list[Row]:
    """Return a row for each way that ran. Ratios compare runs of the same seed."""
    control = {run.seed: time_to(run.curve, REWARD) for run in results if run.way == CONTROL}
    rows = []
    for way in dict.fromkeys(result.way for result in results):
        runs = [result for result in results if result.way == way]
        times = [time_to(run.curve, REWARD) for run in runs]
        ages = sum((Counter(run.ages) for run in runs), Counter[int]())
        checks = [run.labels for run in runs if run.labels is not None]
        costs = [run.kv_cost.mean for run in runs if run.kv_cost is not None]
        replays = [run.replayed for run in runs if run.replayed is not None]
        rows.append(
            Row(
                way=way,
                times=times,
                ratios=[
                    base / seconds
                    for run, seconds in zip(runs, times, strict=True)
                    if seconds and (base := control.get(run.seed)) is not None
                ],
                last=[run.curve[-1][2] for run in runs],
                steps=mean(len(run.steps) for run in runs),
                made=mean(run.tokens_made for run in runs),
                thrown_away=mean(run.tokens_thrown_away for run in runs),
                too_old=mean(run.tokens_too_old for run in runs),
                recomputed=mean(run.tokens_recomputed for run in runs),
                behind=sum(age * count for age, count in ages.items()) / max(1, ages.total()),
                still=mean(sum(end - begin for begin, end in run.standstills) for run in runs),
                largest=max((check.largest for check in checks), default=0.0),
                mislabelled=sum(check.mislabelled for check in checks),
                checked=sum(check.tokens for check in checks),
                noticeable=sum(check.noticeable for check in checks),
                off_fresh=mean(costs) if costs else 0.0,
                replayed=sum(each.rollouts for each in replays),
                replayed_equal=sum(each.equal for each in replays),
            )
        )
    return rows


def cells(row: Row) -> list[str]:
    """Return a row's texts, in the order of ``HEADS``."""
    reached = [seconds for seconds in row.times if seconds is not None]
    time = _spread(reached, "{:.0f} s")
    if len(reached) < len(row.times):
        time += f" in {len(reached)} of {len(row.times)}" if reached else "not reached"
    return [
        row.way, time, _spread(row.ratios, "{:.2f}x") or "-", _spread(row.last, "{:.2f}"),
        f"{row.steps:.0f}", f"{row.made:,.0f}", f"{row.thrown_away:,.0f}", f"{row.too_old:,.0f}",
        f"{row.recomputed:,.0f}", f"{row.behind:.1f}", f"{row.still:.1f} s",
        f"{row.largest:.0e}", f"{row.mislabelled} of {row.checked:,}",
        f"{row.noticeable:,}", f"{row.off_fresh:.1e}",
        f"{row.replayed_equal} of {row.replayed}" if row.replayed else "-",
    ]  # fmt: skip


def as_markdown(rows: Sequence[Row]) -> str:
    lines = [HEADS, ["---"] * len(HEADS), *map(cells, rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def show_table(console: Console, rows: Sequence[Row]) -> None:
    """Show a column for each way, which fits a terminal."""
    table = Table(title="Five ways to update the weights")
    columns = list(zip(HEADS, *map(cells, rows), strict=True))
    for place, heading in enumerate(columns[0]):
        table.add_column(heading, justify="left" if place == 0 else "right", overflow="fold")
    for column in columns[1:]:
        table.add_row(*column)
    console.print(table)


def write_report(folder: Path, results: Sequence[Result], settings: Settings) -> Path:
    """Write ``results.json``, ``table.md``, the pictures and the page, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = make_table(results)
    content = {
        "settings": asdict(settings),
        "reward": REWARD,
        "table": [row._asdict() for row in rows],
        "results": [result.as_json() for result in results],
    }
    (folder / "results.json").write_text(json.dumps(content))
    (folder / "table.md").write_text(as_markdown(rows))
    pictures = list(draw(folder, results, rows))
    page = folder / "index.html"
    page.write_text(_page(pictures, rows, settings))
    return page


def draw(folder: Path, results: Sequence[Result], rows: Sequence[Row]) -> Iterator[Picture]:
    """Draw the pictures as PNG files."""
    ways = [row.way for row in rows]

    for name, place, unit in (("seconds", 0, "seconds"), ("samples", 1, "samples trained on")):
        picture, axes = _new(folder, f"reward-{name}", f"Reward of held-out questions by {unit}")
        for way in ways:
            for number, run in enumerate(result for result in results if result.way == way):
                axes.plot(
                    [point[place] for point in run.curve],
                    [point[2] for point in run.curve],
                    color=COLOURS.get(way, OTHER),
                    label=None if number else way,
                    linestyle="--" if way.endswith("sparse") else "-",
                )
        axes.axhline(REWARD, color="black", linestyle=":", linewidth=1)
        axes.annotate(f"reward {REWARD}", (0, REWARD), va="bottom", fontsize=9)
        axes.set(xlabel=unit, ylabel="expected reward", ylim=(0, 1))
        axes.legend(loc="lower right")
        yield _save(picture)

    picture, axes = _new(folder, "reward-training", "Reward of the samples trained on, by seconds")
    for way in ways:
        for number, run in enumerate(result for result in results if result.way == way):
            axes.plot(
                [step.ended for step in run.steps],
                [step.reward for step in run.steps],
                color=COLOURS.get(way, OTHER),
                alpha=0.7,
                linewidth=1,
                label=None if number else way,
            )
    axes.set(xlabel="seconds", ylabel="mean reward of a step", ylim=(0, 1))
    axes.legend(loc="lower right")
    yield _save(picture)

    picture, axes = _new(folder, "tokens", "Tokens computed in a run")
    left = [0.0] * len(ways)
    for label, counts, colour in (
        ("made, and used or unfinished at the end",
         [row.made - row.thrown_away - row.too_old for row in rows], "#009e73"),
        ("made, and thrown away by pauses", [row.thrown_away for row in rows], "#d55e00"),
        ("made, and too old", [row.too_old for row in rows], "#cc79a7"),
        ("KV computed anew", [row.recomputed for row in rows], "#e69f00"),
    ):  # fmt: skip
        axes.barh(ways, counts, left=left, label=label, color=colour)
        left = [begin + count for begin, count in zip(left, counts, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="tokens")
    axes.legend(fontsize=9)
    yield _save(picture)

    picture, axes = _new(folder, "standstills", "When no token came (first seed)")
    for place, way in enumerate(ways):
        run = next(result for result in results if result.way == way)
        spans = [(begin, end - begin) for begin, end in run.standstills]
        axes.broken_barh(spans, (place - 0.4, 0.8), color=COLOURS.get(way, OTHER))
    axes.set(yticks=range(len(ways)), yticklabels=ways, xlabel="seconds")
    axes.invert_yaxis()
    yield _save(picture)

    picture, axes = _new(folder, "ages", "How many versions behind the tokens trained on were")
    width = 0.8 / len(ways)
    for place, way in enumerate(ways):
        ages = sum((Counter(run.ages) for run in results if run.way == way), Counter[int]())
        axes.bar(
            [age + (place - (len(ways) - 1) / 2) * width for age in ages],
            [count / ages.total() for count in ages.values()],
            width,
            color=COLOURS.get(way, OTHER),
            label=way,
        )
    axes.set(xlabel="versions behind the trainer", ylabel="share of the tokens")
    axes.legend()
    yield _save(picture)

    title = "How far sampled log-probabilities are from the trainer's, by the tokens' age"
    picture, axes = _new(folder, "mismatch", title)
    for way in ways:
        for number, run in enumerate(result for result in results if result.way == way):
            axes.plot(
                [int(age) for age in run.mismatch],
                list(run.mismatch.values()),
                color=COLOURS.get(way, OTHER),
                label=None if number else way,
                marker="o",
            )
    axes.set(xlabel="versions behind the trainer", ylabel="mean distance, nats", ylim=(0, None))
    axes.legend()
    yield _save(picture)


def _new(folder: Path, name: str, title: str) -> tuple[tuple[Any, Picture], Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    return (figure, Picture(title, folder / f"{name}.png")), axes


def _save(drawn: tuple[Any, Picture]) -> Picture:
    figure, picture = drawn
    figure.savefig(picture.file, dpi=110)
    return picture


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    middle = form.format(median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({form.format(min(values))} to {form.format(max(values))})"


def _page(pictures: Sequence[Picture], rows: Sequence[Row], settings: Settings) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in HEADS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row)) + "</tr>"
        for row in rows
    )
    images = "".join(
        f'<img alt="{html.escape(picture.title)}" src="data:image/png;base64,'
        f'{base64.b64encode(picture.file.read_bytes()).decode()}">'
        for picture in pictures
    )
    ways = "".join(
        f"<li><b>{html.escape(way.name)}</b>: {html.escape(way.summary)}</li>" for way in WAYS
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<title>Asynchronous GRPO, five ways to update the weights</title>"
        "<style>body{font:15px sans-serif;max-width:1000px;margin:2em auto;padding:0 1em}"
        "div{overflow-x:auto}table{border-collapse:collapse}"
        "td,th{padding:.3em .6em;text-align:right;border-bottom:1px solid #ddd}"
        "td:first-child{text-align:left;white-space:nowrap}img{width:100%;max-width:880px}</style>"
        "<h1>Asynchronous GRPO, five ways to update the weights</h1>"
        f"<ul>{ways}</ul><p>Each run trained for {settings.seconds:.0f} s, with steps of "
        f"{settings.groups} questions and {settings.group_size} answers to each.</p>"
        f"<div><table><tr>{head}</tr>{body}</table></div>{images}</html>"
    )

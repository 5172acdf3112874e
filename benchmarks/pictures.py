"""Pictures of results: one for each benchmark, and two for the documents. Each has its limit.

The limit of a pause, a gap or a commit is one step. The limit of what moves bytes is one copy of
them, at the bandwidth that was measured in the same run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common.folder import Result
from benchmarks.common.plots import (
    COLOURS,
    DPI,
    FAINT,
    INK,
    LIMIT,
    STYLE,
    WIDTH,
    Bar,
    Panel,
    draw,
    name_of,
    save,
)
from benchmarks.common.report import Report, Summary

TIMELINE, SUMMARY = "timeline", "summary"
ONE_STEP = "one step"
ONE_COPY = "bytes over the memory's bandwidth"
SAME_WITHOUT = "the same without updates"
ON_THE_WIRE = "bytes over the busiest link's rate"
NO_TOKEN = "no token"
WITHOUT = "as long a time without an update"
BIN_S = 0.5
WAYS = {"disk": "from disk", "tensor": "by tensors", "distributed": "over a link of 100 MB/s"}
Row = dict[str, Any]


def draw_all(results: Sequence[Result], folder: Path, *, caption: str = "") -> list[str]:
    """Draw every picture that ``results`` have the numbers for, and return their names.

    ``caption`` is a line above each.
    """
    found: dict[str, list[Result]] = {}
    for result in results:
        if result.report is not None:
            found.setdefault(result.planned.script, []).append(result)
    drawn = []
    for script, of_script in found.items():
        if script == TIMELINE:
            draw_timeline(reports_of(of_script)[0], folder / f"{script}.png", caption=caption)
        else:
            draw(PANELS[script](of_script), folder / f"{script}.png", caption=caption)
        drawn.append(script)
    if panels := summary(found):
        draw(panels, folder / f"{SUMMARY}.png", caption=caption, columns=2)
        drawn.append(SUMMARY)
    return drawn


def reports_of(results: Sequence[Result]) -> list[Report]:
    return [result.report for result in results if result.report is not None]


def bar(
    label: str, server: str, value: Any, limit: float | None = None, mark: float | None = None
) -> Bar:
    """Return the bar of a cell: a summary, or a number."""
    if isinstance(value, Summary):
        return Bar(label, server, value.median, value.low, value.high, limit, mark)
    return Bar(label, server, float(value), limit=limit, mark=mark)


def rows_of(results: Sequence[Result]) -> Iterator[tuple[str, Result, Row]]:
    """Yield each row with its result, and the label of its run if there are several runs."""
    for result, report in zip(results, reports_of(results), strict=True):
        label = f"{result.planned.label}, " if len(results) > 1 else ""
        for row in report.rows:
            yield label, result, row


# ---- a benchmark's panels -----------------------------------------------------------


def _throughput(results: Sequence[Result]) -> list[Panel]:
    bars = [bar(row["model"], "ours", row["ratio"], 1) for _, _, row in rows_of(results)]
    return [
        Panel("Tokens per second over those of SGLang without patches", "ratio", bars, "no cost")
    ]


def _pause_grant(results: Sequence[Result]) -> list[Panel]:
    def bars(key: str, *, state: str | None = None) -> list[Bar]:
        return [
            bar(f"{label}{row['state']}", row["server"], row[key], _median(row["step"]))
            for label, _, row in rows_of(results)
            if row[key] is not None and state in (None, row["state"])
        ]

    return [
        Panel("From a pause to the last token, while decoding", "ms",
              bars("silence", state="decoding"), ONE_STEP),
        Panel("From a pause to its answer (upstream's says only that the message was sent)", "ms",
              bars("answer"), ONE_STEP),
    ]  # fmt: skip


def _update_gap(results: Sequence[Result]) -> list[Panel]:
    gaps, seconds = [], []
    for _, result, row in rows_of(results):
        size = result.report.options["size"] if result.report else ""
        name = f"{size}, {row['update']}"
        gaps.append(_gap(row, name))
        seconds.append(bar(name, row["server"], row["update_s"], result.copy_s(size)))
    return [
        Panel("Largest gap between tokens during an update", "over the median gap", gaps, ONE_STEP,
              WITHOUT),
        Panel("Time of an update", "s", seconds, ONE_COPY),
    ]  # fmt: skip


def _gap(row: Row, label: str) -> Bar:
    return bar(label, row["server"], row["ratio"], 1, _median(row["still_ratio"]))


def _small_tensors(results: Sequence[Result]) -> list[Panel]:
    def bars(key: str, *, limit: float | None = 1, mark: str | None = None) -> list[Bar]:
        return [
            bar(f"{label}by {row['way']}", row["server"], row[key], limit,
                _median(row[mark]) if mark else None)
            for label, _, row in rows_of(results)
            # upstream makes no step beside an update
            if row[key] is not None
        ]  # fmt: skip

    return [
        Panel("p95 of the gaps between tokens beside the update", "over that without an update",
              bars("p95_ratio", mark="control_ratio"), SAME_WITHOUT, "the control"),
        Panel("Largest of them", "over that without an update", bars("largest_ratio"),
              SAME_WITHOUT),
        Panel("Time of an update without requests; upstream's blocks them", "s",
              bars("idle_s", limit=None)),
    ]  # fmt: skip


def _commit_size(results: Sequence[Result]) -> list[Panel]:
    bars = []
    for _, _, row in rows_of(results):
        step = _median(row["step_ms"])
        bars += [
            bar(row["model"], "ours", row["ours_ms"], step),
            bar(row["model"], "upstream", row["upstream_ms"], step),
        ]
    return [Panel("Time for which generation stands still in an update", "ms", bars, ONE_STEP)]


def _loop_time(results: Sequence[Result]) -> list[Panel]:
    bars = [
        bar(f"{row['rank']}, {what}", "ours", row[what])
        for _, _, row in rows_of(results)
        for what in ("exchange", "pointers", "reset", "turn")
    ]
    return [Panel("Time on the scheduler's loop, without a device's work", "ms", bars)]


def _changes(results: Sequence[Result]) -> list[Panel]:
    held, staged = [], []
    for _, result, row in rows_of(results):
        name = f"{row['model']}, {row['update']}, {row['percent']:g} %"
        held.append(bar(name, row["server"], row["held_ms"], _median(row["step_ms"])))
        if row["staged_s"] is not None:
            staged.append(bar(name, row["server"], row["staged_s"], result.copy_s(row["model"])))
    return [
        Panel("Time for which the loop is held", "ms", held, ONE_STEP),
        Panel("Time of staging", "s", staged, ONE_COPY),
    ]


def _sustained(results: Sequence[Result]) -> list[Panel]:
    bars = [bar(row["update"], row["server"], row["ratio"], 1) for _, _, row in rows_of(results)]
    return [
        Panel("Tokens per second under updates", "over those without updates", bars, SAME_WITHOUT)
    ]


def _thrown_away(results: Sequence[Result]) -> list[Panel]:
    def bars(key: str) -> list[Bar]:
        return [bar(row["mode"], row["server"], row[key], 0) for _, _, row in rows_of(results)]

    return [
        Panel("Tokens generated again for one update", "tokens", bars("made_again"), NO_TOKEN),
        Panel("Tokens of prefills computed again for one update", "tokens",
              bars("computed_again"), NO_TOKEN),
    ]  # fmt: skip


def _trainer_death(results: Sequence[Result]) -> list[Panel]:
    bars = [_death(result, row, row["phase"]) for _, result, row in rows_of(results)]
    return [Panel("From the trainer's death to the next token of each stream", "ms", bars,
                  ONE_STEP)]  # fmt: skip


def _death(result: Result, row: Row, label: str) -> Bar:
    step = _median(row["step_ms"])
    if isinstance(row["next_ms"], Summary):
        return bar(label, row["server"], row["next_ms"], step)
    watched = result.report.options["watch"] if result.report else 0.0
    return Bar(label, row["server"], 1000 * watched, limit=step, text=f"more than {watched:g} s")


def _front_door(results: Sequence[Result]) -> list[Panel]:
    rows = [row for _, _, row in rows_of(results)]
    without = {row["server"]: row for row in rows if row["ratio"] is None}

    def bars(key: str) -> list[Bar]:
        return [
            bar(f"tensors: {row['tensors']}", row["server"], row[key],
                _median(without[row["server"]][key]))
            for row in rows
        ]  # fmt: skip

    return [
        Panel("Requests answered", "per second", bars("rate"), SAME_WITHOUT),
        Panel("Median latency", "ms", bars("median_ms"), SAME_WITHOUT),
        Panel("p95 of the latency", "ms", bars("p95_ms"), SAME_WITHOUT),
    ]


def _sleep(results: Sequence[Result]) -> list[Panel]:
    def bars(key: str) -> list[Bar]:
        return [
            bar(row["requests"], row["server"], row[key], 1e9 / result.copy_bytes_per_s)
            for _, result, row in rows_of(results)
        ]

    return [
        Panel("Release of memory", "s per GB", bars("release_per_gb"), ONE_COPY),
        Panel("Resume of memory", "s per GB", bars("resume_per_gb"), ONE_COPY),
    ]


def _read_checkpoint(results: Sequence[Result]) -> list[Panel]:
    bars = [
        bar(row["file"], row["reader"], row["s"], result.copy_s(result.report.options["size"]))
        for _, result, row in rows_of(results)
        if result.report is not None
    ]
    return [Panel("Time to read a checkpoint", "s", bars, ONE_COPY)]


def _parts(results: Sequence[Result]) -> list[Panel]:
    bars = [
        bar(f"servers: {row['servers']}", row["way"], row["seconds"], row["wire_s"])
        for _, _, row in rows_of(results)
    ]
    return [Panel("Time of an update, from two ranks of a trainer", "s", bars, ON_THE_WIRE)]


def _kv_age(results: Sequence[Result]) -> list[Panel]:
    def bars(key: str) -> list[Bar]:
        return [
            bar(f"{row['turns']} turns, {row['bound']}", row["way"], row[key])
            for _, _, row in rows_of(results)
        ]

    return [
        Panel("Tokens of prefills for each token made", "tokens", bars("prefilled")),
        Panel("Distance of log-probabilities from those with fresh KV", "mean", bars("off")),
        Panel("Tokens per second", "tokens/s", bars("rate")),
    ]


PANELS: dict[str, Callable[[Sequence[Result]], list[Panel]]] = {
    "throughput": _throughput,
    "pause_grant": _pause_grant,
    "update_gap": _update_gap,
    "small_tensors": _small_tensors,
    "commit_size": _commit_size,
    "loop_time": _loop_time,
    "changes": _changes,
    "sustained": _sustained,
    "thrown_away": _thrown_away,
    "trainer_death": _trainer_death,
    "front_door": _front_door,
    "sleep": _sleep,
    "read_checkpoint": _read_checkpoint,
    "kv_age": _kv_age,
    "parts": _parts,
}


def _median(value: Any) -> float | None:
    return value.median if isinstance(value, Summary) else value


# ---- the summary --------------------------------------------------------------------


def summary(found: dict[str, list[Result]]) -> list[Panel]:
    """Return the panels of the summary, as far as there are numbers."""
    panels = []
    if of_script := found.get("update_gap"):
        bars = [_gap(row, row["update"]) for _, _, row in rows_of(of_script[:1])]
        panels.append(
            Panel("Largest gap between tokens\nduring an update", "steps", bars, ONE_STEP,
                  "no update")
        )  # fmt: skip
    if of_script := found.get("commit_size"):
        panels.append(
            Panel("Generation stands still\nfor an update from disk", "ms",
                  _commit_size(of_script)[0].bars, ONE_STEP)
        )  # fmt: skip
    if of_script := found.get("trainer_death"):
        bars = [_death(result, row, row["phase"]) for _, result, row in rows_of(of_script)]
        panels.append(
            Panel("Next token after SIGKILL\nof the trainer amid an update", "ms", bars, ONE_STEP)
        )
    if of_script := found.get("thrown_away"):
        bars = [
            bar(row["mode"], row["server"], row["percent"], 0)
            for _, _, row in rows_of(of_script)
            if row["mode"] in ("in flight", "abort")
        ]
        panels.append(
            Panel("Tokens generated again\nfor one update", "% of those wanted", bars, NO_TOKEN)
        )
    if of_script := found.get("front_door"):
        bars = [
            bar("tensors by value", row["server"], row["ratio"], 1)
            for _, _, row in rows_of(of_script)
            if row["ratio"] is not None
        ]
        panels.append(
            Panel("Short requests per second\nwhile tensors come", "ratio", bars, SAME_WITHOUT)
        )
    if of_script := found.get("throughput"):
        panels.append(
            Panel("Tokens per second without\nupdates, over upstream's", "ratio",
                  _throughput(of_script)[0].bars, "no cost")
        )  # fmt: skip
    return panels


# ---- the timeline -------------------------------------------------------------------


def draw_timeline(report: Report, file: Path, *, caption: str = "") -> None:
    """Draw tokens per second around each recorded update, and below them each stream's tokens."""
    import matplotlib as mpl

    # those of one way stand together, and sorting keeps the servers' order
    records = sorted(report.facts["records"], key=lambda record: record["update"])
    quiet = report.options["quiet"]
    longest = max(record["seconds"] for record in records)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.5 * len(records) + 0.9), dpi=DPI, layout="constrained")
        ratios = [3, 1] * len(records)
        grid = figure.subplots(2 * len(records), 1, sharex=True, height_ratios=ratios)
        for number, record in enumerate(records):
            rates, streams = grid[2 * number], grid[2 * number + 1]
            _draw_rates(rates, record, quiet)
            _draw_streams(streams, record)
        grid[-1].set_xlim(-quiet, longest + quiet)
        grid[-1].set_xlabel("seconds from the begin of the update")
        title = (
            "Tokens per second around one update (shaded), and each stream's tokens. "
            "Dashed: the rate before it."
        )
        lines = [title, caption] if caption else [title]
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=9)
        save(figure, file)


def rates_in_bins(
    arrivals: Sequence[Sequence[Sequence[float]]], start: float, end: float, bin_s: float
) -> tuple[list[float], list[float]]:
    """Return the begins of whole bins in a window, and the tokens/s of all streams in each."""
    count = int((end - start) / bin_s + 1e-9)
    tokens = [0.0] * count
    for at, number in itertools.chain.from_iterable(arrivals):
        place = int((at - start) // bin_s)
        if 0 <= place < count:
            tokens[place] += number
    return [start + bin_s * i for i in range(count)], [each / bin_s for each in tokens]


def _draw_rates(axes: Axes, record: Row, quiet: float) -> None:
    seconds = record["seconds"]
    begins, rates = rates_in_bins(record["arrivals"], -quiet, seconds + quiet, BIN_S)
    before = [rate for begin, rate in zip(begins, rates, strict=True) if begin + BIN_S <= 0]
    axes.axvspan(0, seconds, color="#EFEFEF", zorder=0)
    axes.stairs(
        rates, [*begins, begins[-1] + BIN_S], fill=True,
        color=COLOURS.get(record["server"], FAINT), alpha=0.85,
    )  # fmt: skip
    axes.axhline(sum(before) / len(before), color=LIMIT, linestyle="--", linewidth=1.2)
    title = f"{name_of(record['server'])}: update {WAYS[record['update']]} in {seconds:.3g} s"
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_ylabel("tokens/s", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(axis="x", length=0, labelbottom=False)


def _draw_streams(axes: Axes, record: Row) -> None:
    axes.axvspan(0, record["seconds"], color="#EFEFEF", zorder=0)
    times = [[at for at, _ in stream] for stream in record["arrivals"]]
    axes.eventplot(times, colors=INK, linelengths=0.8, linewidths=0.6)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)

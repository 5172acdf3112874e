"""Draw a recording. Imported only for drawing, because matplotlib is an extra."""

from __future__ import annotations

import html
import io
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sglang_inflight.cli.recording import Recording

BLUE, ORANGE, GREEN, RED, GREY = "#2b6cb0", "#c05621", "#2f855a", "#c53030", "#a0aec0"


def draw(recording: Recording, file: Path) -> None:
    """Write ``file``: a page if its name ends in .html, else matplotlib's format of that suffix."""
    figure = _plot(recording)
    if file.suffix != ".html":
        figure.savefig(file, dpi=150)
        return
    svg = io.StringIO()
    # keep text as text, so that readers can search and copy it
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(svg, format="svg")
    picture = svg.getvalue()
    first, last = recording.samples[0], recording.samples[-1]
    title = html.escape(f"{first.weight_version} → {last.weight_version}")
    file.write_text(
        f"<!doctype html><html><head><meta charset='utf-8'><title>{title}</title></head>"
        f"<body>{picture[picture.index('<svg') :]}</body></html>"
    )


def _plot(recording: Recording) -> Figure:
    figure = Figure(figsize=(11, 7), layout="constrained")
    throughput, requests, staged = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1, 1]}
    )
    samples = recording.samples
    at = [sample.at for sample in samples]
    throughput.plot(at, [sample.tokens_per_s for sample in samples], color=BLUE)
    throughput.set_ylabel("tokens/s")
    running = [sample.running for sample in samples]
    requests.step(at, running, color=GREEN, where="post", label="running")
    waiting = [sample.waiting for sample in samples]
    requests.step(at, waiting, color=ORANGE, where="post", label="waiting")
    requests.set_ylabel("requests")
    requests.legend(loc="upper left")
    staged.fill_between(at, [sample.staged_bytes / 1e6 for sample in samples], color=ORANGE)
    staged.set_ylabel("staged MB")
    staged.set_xlabel("seconds")
    for axes in (throughput, requests, staged):
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
        _mark(axes, recording)
    for change in recording.changes:
        throughput.annotate(
            change.weight_version,
            (change.at, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, 3),
            textcoords="offset points",
            color=RED,
        )
    return figure


def _mark(axes: Axes, recording: Recording) -> None:
    for begin, end in recording.pauses:
        axes.axvspan(begin, end, color=GREY, alpha=0.4, linewidth=0)
    for change in recording.changes:
        axes.axvline(change.at, color=RED, linewidth=1)

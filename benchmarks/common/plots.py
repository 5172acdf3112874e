"""The style of all pictures: horizontal bars with their range and their limit, at 800 pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

WIDTH, DPI = 8.0, 100  # inches, and dots of an inch
# Okabe and Ito's colours, which colour-blind readers can tell apart
COLOURS = {
    "ours": "#0072B2", "upstream": "#E69F00", "vllm": "#009E73",
    "changes": "#0072B2", "device": "#56B4E9", "unpaced": "#CC79A7", "mapped": "#E69F00",
    "at once": "#0072B2", "hard": "#E69F00", "soft": "#56B4E9",
    "relays": "#0072B2", "direct": "#56B4E9", "broadcast": "#E69F00",
}  # fmt: skip
NAMES = {"upstream": "SGLang without patches", "vllm": "vLLM", "ours": "SGLang Inflight"}
INK, FAINT, LIMIT = "#222222", "#BBBBBB", "#D55E00"
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "axes.edgecolor": FAINT,
    "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.titlesize": 10,
    "axes.titleweight": "bold", "axes.spines.top": False, "axes.spines.right": False,
    "figure.facecolor": "white", "axes.facecolor": "white", "savefig.facecolor": "white",
}  # fmt: skip
BAR_INCHES, FRAME_INCHES = 0.24, 1.0
# beyond this ratio of the largest to the smallest value, small ones cannot be seen
LOGARITHMIC = 30.0


@dataclass(frozen=True)
class Bar:
    """A value with its range. ``limit`` is what it could be at best, ``mark`` its control.

    ``text`` stands for the number, for instance where a measurement was given up.
    """

    label: str
    server: str
    value: float
    low: float | None = None
    high: float | None = None
    limit: float | None = None
    mark: float | None = None
    text: str | None = None


@dataclass(frozen=True)
class Panel:
    """A group of bars on one axis. ``title`` says what the axis measures, ``unit`` its unit.

    ``limit`` names the bars' limits, and ``mark`` their marks.
    """

    title: str
    unit: str
    bars: Sequence[Bar]
    limit: str | None = None
    mark: str | None = None

    @property
    def is_log(self) -> bool:
        """Tell whether values and limits are too far apart for a linear axis."""
        shown = [v for bar in self.bars for v in (bar.value, bar.limit) if v is not None and v > 0]
        return bool(shown) and max(shown) > LOGARITHMIC * min(shown)


def draw(panels: Sequence[Panel], file: Path, *, caption: str = "", columns: int = 1) -> None:
    """Draw ``panels`` into ``file``, a PNG. The same panels give the same bytes.

    ``columns`` panels stand side by side. ``caption`` is a line above all.
    """
    import matplotlib as mpl

    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    inches = [max(len(p.bars) for p in row) * BAR_INCHES + FRAME_INCHES for row in rows]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, sum(inches) + 0.5), dpi=DPI, layout="constrained")
        grid = figure.subplots(len(rows), columns, squeeze=False, height_ratios=inches)
        for axes, panel in zip(grid.flat, panels, strict=False):
            _draw_panel(axes, panel)
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_axis_off()
        _legend(figure, panels, caption)
        save(figure, file)


def save(figure: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # no version of the library: the same results give the same file
    figure.savefig(file, metadata={"Software": None})


def name_of(server: str) -> str:
    return NAMES.get(server, server)


def number(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _draw_panel(axes: Axes, panel: Panel) -> None:
    places = list(range(len(panel.bars)))
    smallest = _left_end(panel)
    if panel.is_log:
        axes.set_xscale("log")
        axes.set_xlim(left=smallest)
    for place, bar in zip(places, panel.bars, strict=True):
        if bar.mark is not None:
            axes.plot(bar.mark, place, "D", color=INK, markeredgecolor="white", markersize=6)
        axes.barh(place, bar.value, height=0.72, color=COLOURS.get(bar.server, FAINT))
        end = bar.value
        if bar.low is not None and bar.high is not None and bar.high > bar.low:
            axes.hlines(place, max(bar.low, smallest), bar.high, color=INK, linewidth=1)
            end = max(end, bar.high)
        axes.annotate(
            bar.text or number(bar.value),
            (max(end, smallest), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            # readable across a limit
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            zorder=5,
        )
        if bar.limit is not None:
            axes.vlines(
                bar.limit, place - 0.5, place + 0.5, color=LIMIT, linestyle="--", linewidth=1.3
            )
    # a bar of 0 shows no colour
    axes.set_yticks(places, [f"{bar.label}, {bar.server}" for bar in panel.bars])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.margins(y=0.02)
    axes.set_title(panel.title, loc="left")
    names = [panel.unit]
    if panel.limit:
        names.append(f"dashed: {panel.limit}")
    if panel.mark:
        names.append(f"\N{BLACK DIAMOND}: {panel.mark}")
    axes.set_xlabel("; ".join(names))
    axes.grid(axis="x", color="#EEEEEE", zorder=0)
    axes.set_axisbelow(True)
    _leave_room_for_numbers(axes, panel, smallest)


def _left_end(panel: Panel) -> float:
    """Return where a logarithmic axis begins; 0 for a linear one."""
    if not panel.is_log:
        return 0.0
    shown = [v for bar in panel.bars for v in (bar.value, bar.limit) if v is not None and v > 0]
    return 10 ** math.floor(math.log10(min(shown)) - 0.3)


def _leave_room_for_numbers(axes: Axes, panel: Panel, smallest: float) -> None:
    ends = [v for b in panel.bars for v in (b.value, b.high, b.limit, b.mark) if v is not None]
    longest = max(len(bar.text or number(bar.value)) for bar in panel.bars)
    share = min(0.12 + 0.014 * longest, 0.45)
    most = max(ends)
    if panel.is_log:
        axes.set_xlim(smallest, most * (most / smallest) ** (share / (1 - share)))
    elif most > 0:
        axes.set_xlim(0, most / (1 - share))


def _legend(figure: Figure, panels: Sequence[Panel], caption: str) -> None:
    servers = dict.fromkeys(bar.server for panel in panels for bar in panel.bars)
    marks: list[Patch | Line2D] = [
        Patch(color=COLOURS.get(server, FAINT), label=name_of(server)) for server in servers
    ]
    if any(panel.limit for panel in panels):
        marks.append(Line2D([], [], color=LIMIT, linestyle="--", label="limit"))
    figure.legend(
        handles=marks, loc="outside upper left", ncols=min(len(marks), 4), frameon=False,
        title=caption or None, alignment="left", fontsize=8.5,
    )  # fmt: skip

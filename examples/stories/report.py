"""The report: stories by version, receipts, checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.stories.checks import Check
from examples.stories.gaps import largest_gap, median_gap
from examples.stories.streams import Story
from examples.stories.updating import UpdateResult
from examples.stories.weights import checkpoint_bytes

COLOURS = ("white", "green", "cyan", "magenta", "yellow")


def colour_versions(versions: Sequence[str]) -> dict[str, str]:
    return {version: COLOURS[i % len(COLOURS)] for i, version in enumerate(versions)}


def show_stories(
    console: Console,
    stories: Sequence[Story],
    colours: dict[str, str],
    decode: Callable[[list[int]], str],
) -> None:
    """Show the stories. A mark at each change of weights serves terminals without colours."""
    for story in stories:
        text = Text()
        for span in story.spans:
            colour = colours.get(span.version, "red")
            text.append(f"[{span.version}]", style=f"reverse {colour}")
            text.append(decode(story.ids[span.start : span.end]), style=colour)
        console.print(Panel(text, title=story.title, title_align="left"))


def show_receipts(
    console: Console,
    results: Sequence[UpdateResult],
    stories: Sequence[Story],
    colours: dict[str, str],
) -> None:
    arrivals = [story.arrivals for story in stories]
    table = Table(title="Updates under running requests")
    for heading in ("version", "came", "digest"):
        table.add_column(heading, no_wrap=True)
    for heading in ("MB", "staged s", "held ms", "gap ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        update, receipt = result.update, result.receipt
        gap = largest_gap(arrivals, result.started, result.ended)
        ranks = receipt.get("ranks") or []
        table.add_row(
            Text(f"{receipt.get('base_version', '-')} → {update.version}", colours[update.version]),
            update.name,
            "\n".join(str(rank.get("digest", "-"))[:8] for rank in ranks) or "-",
            f"{receipt.get('bytes', 0) / 1e6:.0f}",
            f"{receipt.get('staged_s', 0.0):.2f}",
            f"{receipt.get('stall_ms', 0.0):.2f}",
            f"{gap * 1e3:.0f}",
        )
    console.print(table)
    console.print(
        "digest: a checksum of a rank's served weights. held: time for which the commit\n"
        "held the scheduler's loop. gap: the longest wait between two chunks of a story\n"
        f"during the update; the median of all is {median_gap(arrivals) * 1e3:.0f} ms.",
        highlight=False,
    )


def tell_patches(console: Console, results: Sequence[UpdateResult]) -> None:
    for result in results:
        update, staged_as = result.update, result.receipt.get("staged_as")
        if update.patches is None or staged_as is None:
            continue
        changed, share = staged_as["changed_elements"], staged_as["changed_fraction"]
        peak, copy = staged_as["staging_bytes_peak"], checkpoint_bytes(update.checkpoint)
        console.print(
            f"{update.version} came {update.name}: {changed:,} elements changed ({share:.0%}). "
            f"Staging them took {peak / 1e6:.0f} MB,\n"
            f"where a second copy of the weights takes {copy / 1e6:.0f}.",
            highlight=False,
        )


def show_checks(console: Console, checks: Sequence[Check]) -> None:
    for check in checks:
        mark = "[green]✓[/]" if check.holds else "[bold red]✗[/]"
        console.print(mark, Text(f"{check.claim} ({check.detail})"))

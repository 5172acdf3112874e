"""Writes the page and the pictures of a run: ``python -m benchmarks.results FOLDER [--publish]``.

Everything comes from the folder's JSON files. Without ``--publish`` the page is ``RESULTS.md`` in
the folder. With it, the page takes the place of ``benchmarks/RESULTS.md``, whose part about GPUs
stays, and the pictures go to ``docs/pictures``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks import pictures
from benchmarks.common.folder import Folder, Result
from benchmarks.common.machine import ROOT
from benchmarks.common.report import Goal, Report, cell
from benchmarks.gpu.report import BEGIN, END
from benchmarks.plan import ABOUT

PAGE = ROOT / "benchmarks" / "RESULTS.md"
README = "README"
PICTURES = ROOT / "docs" / "pictures"
NO_GPU = f"{BEGIN}\n## gpu\nThe kit (`make gpu`) has not run on a GPU yet.\n{END}\n"
QUICK = "Quick run: small models and few rounds. It shows that everything runs, and no more."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.results", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of a run")
    parser.add_argument("--publish", action="store_true", help="write benchmarks/RESULTS.md")
    options = parser.parse_args(arguments)
    folder = Folder.read(options.folder)
    print(publish(folder) if options.publish else write(folder))


def write(folder: Folder) -> Path:
    """Write the page and the pictures into the folder, and return the page."""
    return _write(folder, folder.path / "RESULTS.md", folder.path / "pictures")


def publish(folder: Folder, *, page: Path = PAGE, into: Path = PICTURES) -> Path:
    """Write the page in place of the last one, and the pictures. Return the page."""
    return _write(folder, page, into)


def _write(folder: Folder, page: Path, into: Path) -> Path:
    results = folder.results()
    caption = QUICK if any(result.run["quick"] for result in results) else ""
    drawn = pictures.draw_all(results, into, caption=caption)
    files = {README: ROOT / "benchmarks" / "README.md"}
    files |= {name: into / f"{name}.png" for name in drawn}
    links = {name: os.path.relpath(file, page.parent) for name, file in files.items()}
    last = page.read_text() if page.exists() else ""
    page.write_text(page_of(folder, links) + "\n" + gpu_part(last))
    return page


def gpu_part(page: str) -> str:
    """Return a page's part about GPUs, with its markers; without one, a part that says so."""
    _, begin, rest = page.partition(BEGIN)
    inside, end, _ = rest.partition(END)
    return f"{begin}{inside}{end}\n" if begin and end else NO_GPU


def page_of(folder: Folder, links: dict[str, str]) -> str:
    """Return the page without its part about GPUs. ``links`` are the pictures and the README."""
    results = folder.results()
    machine = folder.machine
    lines = [
        "# Results",
        "",
        "`make bench` has written this page from the JSON files of its run; "
        "`python -m benchmarks.results FOLDER` does so, too. "
        f"[How to read it]({links[README]}#how-to-read-them).",
        "",
        f"The machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"Linux {machine['kernel']}, without a GPU.",
    ]
    if any(result.run["quick"] for result in results):
        lines += ["", f"**{QUICK}**"]
    lines += ["", *_overview(results)]
    if pictures.SUMMARY in links:
        lines += ["", f"![Key figures]({links[pictures.SUMMARY]})"]
    for script, of_script in groupby(results, lambda result: result.planned.script):
        lines += ["", f"## {script}", ABOUT[script]]
        if script in links:
            lines += ["", f"![{script}]({links[script]})"]
        for result in of_script:
            lines += ["", *_section(result)]
    return "\n".join(lines) + "\n"


def _overview(results: Sequence[Result]) -> Iterator[str]:
    goals = [(result, goal) for result in results for goal in _goals(result)]
    missed = [(result, goal) for result, goal in goals if not goal.is_met]
    yield f"Goals met: {len(goals) - len(missed)} of {len(goals)}." + (" Missed:" if missed else "")
    yield from (f"- {result.planned.name}: {_said(goal)}" for result, goal in missed)
    for result in results:
        if result.run["state"] != "ran":
            yield f"- {result.planned.name} **{result.run['state']}**: {result.run['why']}"


def _goals(result: Result) -> list[Goal]:
    return result.report.goals if result.report else []


def _said(goal: Goal) -> str:
    return f"{goal.text}: **{cell(goal.value)}**"


def _section(result: Result) -> Iterator[str]:
    run, report = result.run, result.report
    if result.planned.label:
        yield f"### {result.planned.name}"
    yield _about(result)
    yield ""
    yield f"    {run['command']}"
    if run["state"] != "ran":
        yield ""
        yield f"This benchmark **{run['state']}**: {run['why']}"
    if report is None:
        return
    yield ""
    yield from table(report)
    yield ""
    yield from (
        f"- {'Met' if goal.is_met else '**Missed**'}: {_said(goal)}" for goal in report.goals
    )
    yield from (f"- {note}" for note in report.notes)
    for size in report.facts.get("model_bytes", {}):
        nbytes = report.facts["model_bytes"][size]
        seconds = result.copy_s(size)
        yield (
            f"- limit: one copy of the weights of {size} ({nbytes / 1e6:,.0f} MB) takes "
            f"{cell(seconds)} s."
        )
    for peer, why in run["left_out"].items():
        yield f"- {peer} was not run: {why}"


def _about(result: Result) -> str:
    run = result.run
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    return (
        f"{run['date']}, commit {run['commit']}. {versions}. The load was {run['load']:.2f} before "
        f"it, and it took {run['seconds']:.0f} s. Memory copies "
        f"{result.copy_bytes_per_s / 1e9:.2f} GB/s."
    )


def table(report: Report) -> Iterator[str]:
    """Yield the lines of a report's table in Markdown: medians, with least and most."""
    yield f"| {' | '.join(report.columns)} |"
    yield f"|{'---|' * len(report.columns)}"
    for row in report.rows:
        cells = (cell(value).replace("|", "\\|") for value in row.values())
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

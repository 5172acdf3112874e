"""Turns the results of a run into a page: ``python -m benchmarks.gpu.report FOLDER [--publish]``.

Without ``--publish`` the page is printed. With it, the page takes the place of the last one in
``benchmarks/RESULTS.md``, and one line in ``docs/reference/limits.md`` says what has run where.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
LIMITS = ROOT / "docs" / "reference" / "limits.md"
BEGIN, END = "<!-- gpu -->", "<!-- end of gpu -->"
NOTHING = "**GPUs.** Nothing has run on a GPU yet.\n"
_LIMIT, _P95, _COUNT = "_limit", "_p95", "_n"
# less of these is better, so the share is that of the limit
_TIMES = ("_s", "_ms", "_us")
_RATE = "_per_s"

Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of a run")
    parser.add_argument("--publish", action="store_true", help="write RESULTS.md and the limits")
    options = parser.parse_args()
    if options.publish:
        try:
            publish(options.folder)
        except ValueError as refusal:
            parser.error(str(refusal))
    else:
        print(page(options.folder), end="")


def page(folder: Path) -> str:
    """Return the page of the run in ``folder``, with a table for each step."""
    machine = _machine(folder)
    lines = ["## gpu", f"{_about(machine)}"]
    if machine["is_glass"]:
        lines.append("Times are not compared with limits.")
    else:
        lines.append(
            "The share of a time is its limit divided by it. The share of any other number is the "
            "number divided by its limit."
        )
    if machine["small"]:
        lines += ["", "All sizes are small: the numbers show that the steps run, and nothing else."]
    for result in _results(folder):
        lines += ["", *_section(result, are_times_compared=not machine["is_glass"])]
    return "\n".join(lines) + "\n"


def is_gpu(machine: Result) -> bool:
    """Return whether ``machine``, the content of ``machine.json``, has a GPU: glass is none."""
    return machine["card"] is not None and not machine["is_glass"]


def publish(folder: Path, *, results: Path = RESULTS, limits: Path = LIMITS) -> None:
    """Put the page into ``results``, and the line about cards into ``limits``.

    Each file must have both markers; the text between them is replaced. Raises ``ValueError``
    without them, and if the run was on the glass card.
    """
    machine = _machine(folder)
    if machine["is_glass"]:
        raise ValueError(f"nothing is published of a {machine['card']}")
    for file, text in ((results, page(folder)), (limits, limits_line(folder))):
        file.write_text(replaced(file.read_text(), text))


def replaced(text: str, new: str) -> str:
    """Return ``text`` with ``new`` between the markers. Raises ``ValueError`` without them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the text has no {BEGIN} before an {END}")
    return f"{before}{BEGIN}\n{new}{END}{after}"


def limits_line(folder: Path) -> str:
    """Return the limits' sentences about what has run on which card, and when."""
    machine = _machine(folder)
    if not is_gpu(machine):
        return NOTHING
    results = list(_results(folder))
    sentences = [
        f"**GPUs.** On {machine['date']} the kit of `make gpu` ran on one {machine['card']}, at "
        f"commit {machine['commit']} ([results](../../benchmarks/RESULTS.md#gpu))."
    ]
    for state, said in (("ran", "These ran"), ("failed", "failed"), ("not run", "not run")):
        names = [
            f"{result['step']} ({', '.join(found)})"
            for result in results
            if (found := [name for name, part in result["parts"].items() if part["state"] == state])
        ]
        if names:
            sentences.append(f"{said[0].upper()}{said[1:]}: {'; '.join(names)}.")
    sentences.append("Nothing else has run on a GPU.")
    return "\n".join(sentences) + "\n"


def _about(machine: Result) -> str:
    where = (
        f"{machine['card']}, driver {machine['driver']}, CUDA {machine['cuda']}"
        if is_gpu(machine)
        else machine["card"] or "a machine without a GPU"
    )
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("torch", "triton", "sglang") if machine[name]
    )
    return (
        f"{machine['date']}, commit {machine['commit']}, {where}. {versions}, "
        f"Python {machine['python']}."
    )


def _machine(folder: Path) -> Result:
    machine: Result = json.loads((folder / "machine.json").read_text())
    return machine


def _results(folder: Path) -> Iterator[Result]:
    """Yield each step's file, in the order in which the steps ran."""
    files = [file for file in folder.glob("*.json") if file.name != "machine.json"]
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns):
        yield json.loads(file.read_text())


def _section(result: Result, *, are_times_compared: bool) -> Iterator[str]:
    yield f"### {result['title']}"
    yield f"Step `{result['step']}`, {result.get('seconds', 0):.0f} s." + (
        f" {result['cut']}" if result.get("cut") else ""
    )
    rows = [
        row
        for name, part in result["parts"].items()
        for row in _rows(name, part, are_times_compared)
    ]
    if rows:
        yield ""
        yield "| part | | value | limit | share |"
        yield "|---|---|---|---|---|"
        yield from rows
    others = [
        f"- **{name}**: {part['state']}. {_in_short(part['why'])}"
        for name, part in result["parts"].items()
        if part["state"] != "ran"
    ]
    if others:
        yield ""
        yield from others


def _rows(name: str, part: Result, are_times_compared: bool) -> Iterator[str]:
    values = part["values"]
    belonging = {f"{key}{suffix}" for key in values for suffix in (_LIMIT, _P95, _COUNT)}
    for key, value in values.items():
        if key in belonging:
            continue
        is_compared = are_times_compared or not key.endswith(_TIMES)
        limit = values.get(f"{key}{_LIMIT}") if is_compared else None
        said = _number(value)
        details = []
        if (p95 := values.get(f"{key}{_P95}")) is not None:
            details.append(f"p95 {_number(p95)}")
        if (count := values.get(f"{key}{_COUNT}")) is not None:
            details.append(f"n {count}")
        if details:
            said += f" ({', '.join(details)})"
        share = _share(key, value, limit)
        yield f"| {name} | `{key}` | {said} | {'' if limit is None else _number(limit)} | {share} |"


def _share(key: str, value: Any, limit: Any) -> str:
    if not isinstance(value, int | float) or not isinstance(limit, int | float):
        return ""
    if not value or not limit:
        return ""
    is_time = key.endswith(_TIMES) and not key.endswith(_RATE)
    return f"{limit / value if is_time else value / limit:.0%}"


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).replace("|", "\\|")
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _in_short(text: str | None) -> str:
    """Return the first and the last line: the middle of a server's log says little."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return " … ".join(line[:300] for line in dict.fromkeys((*lines[:1], *lines[-1:])))


if __name__ == "__main__":
    main()

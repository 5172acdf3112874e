"""The table in ``docs/families.md``, which also keeps the results of rows that are not run anew."""

from __future__ import annotations

import re
from dataclasses import astuple, replace

from sglang.srt.models.registry import ModelRegistry

from harness.starting import ROOT
from tests.families.families import why_not_built
from tests.families.result import NOT_BUILT, Counts, Result
from tests.matrix.limits import replace_between

DOCUMENT = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- make families -->\n", "<!-- end -->\n"
NOT_RUN = Result(NOT_BUILT, "this row has not been run")

_ROW = re.compile(
    r"^\| `(\w+)` \| ([\w ]+) \| (\d*) \| (\d*) \| (\d*) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE
)


def classes() -> list[str]:
    """Return the names of all model classes of the installed SGLang."""
    return sorted(ModelRegistry.get_supported_archs(), key=str.lower)


def read() -> dict[str, Result]:
    """Return the document's rows."""
    _, rest = DOCUMENT.read_text().split(BEGIN)
    return {name: Result(kind, why, _counts(*c)) for name, kind, *c, why in _ROW.findall(rest)}


def _counts(planned: str, finished: str, by_loader: str, why: str) -> Counts | None:
    return Counts(int(planned), int(finished), int(by_loader), why) if planned else None


def write(results: dict[str, Result], *, over_servers: bool = True) -> None:
    """Write a row for each class. The document keeps those without a new result.

    A result of tensors alone replaces one of servers only ``over_servers``, or if it is another.
    """
    known = read()
    for name, result in results.items():
        before = known.get(name, NOT_RUN)
        is_kept = before.has_logits and before.kind == result.kind and not over_servers
        known[name] = replace(before, counts=result.counts) if is_kept else result
    rows = {name: _row(name, known) for name in classes()}
    replace_between(DOCUMENT, BEGIN, END, _summary(rows) + _table(rows))


def _row(name: str, known: dict[str, Result]) -> Result:
    reason = why_not_built(name)
    return known.get(name, NOT_RUN) if reason is None else Result(NOT_BUILT, reason)


def _summary(rows: dict[str, Result]) -> str:
    kinds = [result.kind for result in rows.values()]
    counts = [f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds), key=kinds.count)]
    return f"Of {len(kinds)} classes: {', '.join(reversed(counts))}. {_planned(rows)}\n\n"


def _planned(rows: dict[str, Result]) -> str:
    found = [result.counts for result in rows.values() if result.counts is not None]
    whole = sum(not (each.finished or each.by_loader) for each in found)
    none = sum(not each.planned for each in found)
    parts = len(found) - whole - none
    return f"All tensors of {whole} classes are planned, some of {parts}, and none of {none}."


def _table(rows: dict[str, Result]) -> str:
    lines = [f"| `{name}` | {_cells(result)} |\n" for name, result in rows.items()]
    heads = "class", "updates", "planned", "finished", "by the loader", "not planned", "why"
    return f"| {' | '.join(heads)} |\n{'| --- ' * len(heads)}|\n" + "".join(lines)


def _cells(result: Result) -> str:
    counts = result.counts
    numbers = ("",) * 4 if counts is None else astuple(counts)
    return " | ".join([result.kind, *map(str, numbers), result.why])

"""The table in ``docs/families.md``, which also keeps the results of rows that are not run anew."""

from __future__ import annotations

import re

from sglang.srt.models.registry import ModelRegistry

from harness.starting import ROOT
from tests.families.families import why_not_built
from tests.families.result import NOT_BUILT, Result
from tests.matrix.limits import replace_between

DOCUMENT = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- make families -->\n", "<!-- end -->\n"
NOT_RUN = Result(NOT_BUILT, "this row has not been run")

_ROW = re.compile(r"^\| `(\w+)` \| ([\w ]+) \| (.*) \|$", re.MULTILINE)


def classes() -> list[str]:
    """Return the names of all model classes of the installed SGLang."""
    return sorted(ModelRegistry.get_supported_archs(), key=str.lower)


def read() -> dict[str, Result]:
    """Return the document's rows."""
    _, rest = DOCUMENT.read_text().split(BEGIN)
    return {name: Result(kind, why) for name, kind, why in _ROW.findall(rest)}


def write(results: dict[str, Result], *, over_servers: bool = True) -> None:
    """Write a row for each class. The document keeps those without a new result.

    A result of tensors alone replaces a result of servers only ``over_servers``.
    """
    known = read()
    for name, result in results.items():
        if over_servers or name not in known or not known[name].has_logits:
            known[name] = result
    rows = {name: _row(name, known) for name in classes()}
    replace_between(DOCUMENT, BEGIN, END, _summary(rows) + _table(rows))


def _row(name: str, known: dict[str, Result]) -> Result:
    reason = why_not_built(name)
    return known.get(name, NOT_RUN) if reason is None else Result(NOT_BUILT, reason)


def _summary(rows: dict[str, Result]) -> str:
    kinds = [result.kind for result in rows.values()]
    counts = [f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds), key=kinds.count)]
    return f"Of {len(kinds)} classes: {', '.join(reversed(counts))}.\n\n"


def _table(rows: dict[str, Result]) -> str:
    lines = [f"| `{name}` | {result.kind} | {result.why} |\n" for name, result in rows.items()]
    return "| class | updates | why |\n| --- | --- | --- |\n" + "".join(lines)

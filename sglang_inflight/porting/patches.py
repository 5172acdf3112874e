"""Do the patches fit, and where have the lines gone that they change?"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_inflight.livepatch import Patch, PatchRefused, Series, exact
from sglang_inflight.livepatch.functions import function_at
from sglang_inflight.porting.finding import Finding

# how alike two lines are, from 0 to 1, for one to be what became of the other
_ALIKE = 0.6
# where a hunk may be; each more makes the ways to place a patch many more
_MOST_PLACES = 4


def look_at_patches(series: Series, root: Path) -> list[Finding]:
    """One finding for each patch, each looked at with those before it in place.

    Only what fits to the line can be applied; a reason says what else would have to change.
    """
    texts: dict[str, list[str]] = {}
    findings = [
        Finding("patch", patch.name, "; ".join(_apply(patch, texts, root)) or None)
        for patch in series.patches
    ]
    if all(finding.fits for finding in findings):
        try:
            series.within(root).plan()
        except PatchRefused as refusal:
            name = refusal.patch or series.name
            findings.append(Finding("patch", name, refusal.reason))
    return findings


def _apply(patch: Patch, texts: dict[str, list[str]], root: Path) -> Iterator[str]:
    for diff in patch.diffs:
        if diff.file not in texts:
            path = root / diff.file
            if not path.is_file():
                yield f"{diff.file} is not there"
                continue
            texts[diff.file] = path.read_text(encoding="utf-8").splitlines(keepends=True)
        lines = texts[diff.file]
        placed: list[tuple[int, exact.Hunk]] = []
        places = _place(lines, diff.hunks)
        for number, (hunk, at) in enumerate(zip(diff.hunks, places, strict=True), start=1):
            where = f"{diff.file}: hunk {number}"
            if at is None:
                yield f"{where} does not fit{_what_became(lines, hunk)}"
                continue
            placed.append((at, hunk))
            if at != hunk.old - 1:
                yield f"{where} is at line {at + 1}, not at {hunk.old}"
        for at, hunk in sorted(placed, key=lambda each: each[0], reverse=True):
            lines[at : at + len(_old(hunk))] = [t for kind, t in hunk.edits if kind != "-"]


def _old(hunk: exact.Hunk) -> list[str]:
    return [text for kind, text in hunk.edits if kind != "+"]


def _place(lines: Sequence[str], hunks: Sequence[exact.Hunk]) -> list[int | None]:
    """Where all that each expects is, line by line, or None.

    In the hunks' order, and where there is more than one place, so that they have moved alike.
    """
    places = [_places(lines, hunk) or [None] for hunk in hunks]

    def unlikely(chosen: Sequence[int | None]) -> tuple[int, int]:
        moves = [at - hunk.old for at, hunk in zip(chosen, hunks, strict=True) if at is not None]
        return (max(moves) - min(moves), abs(moves[0])) if moves else (0, 0)

    def in_order(chosen: Sequence[int | None]) -> bool:
        found = [at for at in chosen if at is not None]
        return all(first < second for first, second in itertools.pairwise(found))

    ways = [way for way in itertools.product(*places) if in_order(way)]
    return list(min(ways, key=unlikely)) if ways else [None] * len(hunks)


def _places(lines: Sequence[str], hunk: exact.Hunk) -> list[int | None]:
    """The nearest of them."""
    old = _old(hunk)
    places = [at for at in range(len(lines)) if list(lines[at : at + len(old)]) == old]
    return [*sorted(places, key=lambda at: abs(at - hunk.old))[:_MOST_PLACES]]


def _what_became(lines: Sequence[str], hunk: exact.Hunk) -> str:
    """The first line of the hunk that is nowhere near, and what is most like it there."""
    old = [text.strip() for text in _old(hunk) if text.strip()]
    stripped = [line.strip() for line in lines]
    # where most of its lines are within a window of its length
    window = 2 * len(old)
    if not old or not stripped:
        return ""
    wanted = set(old)
    scores = [len(wanted & set(stripped[at : at + window])) for at in range(len(stripped))]
    best = max(range(len(scores)), key=lambda at: (scores[at], -abs(at - hunk.old)))
    here = stripped[best : best + window]
    missing = next((line for line in old if line not in here), None)
    if missing is None:
        return f": its lines are near line {best + 1}, with others among them"
    alike = difflib.get_close_matches(missing, [line for line in here if line], 1, _ALIKE)
    became = f", perhaps {alike[0]!r} now" if alike else ""
    function = function_at("".join(lines), best + 1 + len(old) // 2)
    return f": near line {best + 1} ({function or 'the module'}) {missing!r} is not there{became}"

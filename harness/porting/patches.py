"""Check whether the patches fit, and find where their lines moved."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from harness.porting import Finding
from sglang_inflight.livepatch import Patch, PatchRefused, Series, exact
from sglang_inflight.livepatch.functions import function_at

# similarity, from 0 to 1, for a line to count as a changed form of another
_ALIKE = 0.6
# candidate places of a hunk; the ways to place a patch grow exponentially with it
_MOST_PLACES = 4


def look_at_patches(series: Series, root: Path) -> list[Finding]:
    """Return one finding for each patch, checked with the earlier patches applied.

    A patch fits only if every hunk fits at its line. The reason lists moved and changed hunks.
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
            source = exact.lines_of(path.read_text(encoding="utf-8"))
            texts[diff.file] = [line.text for line in source]
        lines = texts[diff.file]
        placed: list[tuple[int, exact.Hunk]] = []
        places = _place(lines, diff.hunks)
        for number, (hunk, at) in enumerate(zip(diff.hunks, places, strict=True), start=1):
            where = f"{diff.file}: hunk {number}"
            if at is None:
                between = _between(places, diff.hunks, number - 1, len(lines))
                yield f"{where} does not fit{_what_became(lines, between, hunk)}"
                continue
            placed.append((at, hunk))
            if at != hunk.old - 1:
                yield f"{where} is at line {at + 1}, not at {hunk.old}"
        for at, hunk in sorted(placed, key=lambda each: each[0], reverse=True):
            lines[at : at + len(_old(hunk))] = [t for kind, t in hunk.edits if kind != "-"]


def _old(hunk: exact.Hunk) -> list[str]:
    return [text for kind, text in hunk.edits if kind != "+"]


def _place(lines: Sequence[str], hunks: Sequence[exact.Hunk]) -> list[int | None]:
    """Return each hunk's line index, or None if its lines are not there.

    The hunks keep their order. Among several places, choose those moved by the same distance.
    """
    places = [_places(lines, hunk) for hunk in hunks]

    def unlikely(chosen: Iterable[int | None]) -> tuple[int, int, int]:
        pairs = zip(chosen, hunks, strict=True)
        moves = [at + 1 - hunk.old for at, hunk in pairs if at is not None]
        lost = len(hunks) - len(moves)
        return (lost, max(moves) - min(moves), abs(moves[0])) if moves else (lost, 0, 0)

    def in_order(chosen: Sequence[int | None]) -> bool:
        found = [at for at in chosen if at is not None]
        return all(first < second for first, second in itertools.pairwise(found))

    return list(min((way for way in itertools.product(*places) if in_order(way)), key=unlikely))


def _places(lines: Sequence[str], hunk: exact.Hunk) -> list[int | None]:
    """Return a hunk's nearest places, and None for no place."""
    old = _old(hunk)
    places = [at for at in range(len(lines)) if list(lines[at : at + len(old)]) == old]
    return [*sorted(places, key=lambda at: abs(at - hunk.old))[:_MOST_PLACES], None]


def _between(
    places: Sequence[int | None], hunks: Sequence[exact.Hunk], number: int, end: int
) -> range:
    """Return the lines between the placed hunks before and after hunk ``number``."""
    pairs = list(zip(places, hunks, strict=True))
    before = [at + len(_old(hunk)) for at, hunk in pairs[:number] if at is not None]
    after = [at for at, _ in pairs[number + 1 :] if at is not None]
    return range(max(before, default=0), min(after, default=end))


def _what_became(lines: Sequence[str], between: range, hunk: exact.Hunk) -> str:
    """Describe the hunk's first missing line, and the line most like it near the hunk."""
    old = [text.strip() for text in _old(hunk) if text.strip()]
    stripped = [lines[at].strip() for at in between]
    # find the window with most of the hunk's lines
    window = 2 * len(old)
    if not old or not stripped:
        return ""
    wanted = set(old)
    scores = [len(wanted & set(stripped[at : at + window])) for at in range(len(stripped))]
    start = between.start
    best = max(range(len(scores)), key=lambda at: (scores[at], -abs(start + at - hunk.old)))
    here = stripped[best : best + window]
    line = start + best + 1
    missing = next((text for text in old if text not in here), None)
    if missing is None:
        return f": its lines are near line {line}, with others among them"
    alike = difflib.get_close_matches(missing, [text for text in here if text], 1, _ALIKE)
    became = f", perhaps {alike[0]!r} now" if alike else ""
    function = function_at("".join(lines), line + len(old) // 2)
    return f": near line {line} ({function or 'the module'}) {missing!r} is not there{became}"

"""Apply unified diffs exactly: every line of every hunk, at its line number.

``patch`` may shift a hunk or ignore a context line. The change could then run in code unknown to
its author. So no hunk is shifted here, and no line is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from unidiff.errors import UnidiffParseError
from unidiff.patch import Line as DiffLine
from unidiff.patch import PatchedFile, PatchSet

Kind = Literal[" ", "-", "+"]
_REVERSED: dict[Kind, Kind] = {" ": " ", "-": "+", "+": "-"}


class Unreadable(Exception):
    """The file is no diff, or not one for Python modules."""


class Mismatch(Exception):
    """A line of the source differs from the diff's."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line} {reason}")
        self.line = line


@dataclass(frozen=True, slots=True)
class Line:
    """A line with its newline, and the patches that added it or removed lines after it."""

    text: str
    patches: tuple[str, ...] = ()

    def marked(self, *patches: str) -> Line:
        return replace(self, patches=tuple(dict.fromkeys(self.patches + patches)))


@dataclass(frozen=True, slots=True)
class Hunk:
    """Edits from line ``old`` of the source, line ``new`` of the result."""

    old: int
    new: int
    edits: tuple[tuple[Kind, str], ...]

    def reversed(self) -> Hunk:
        return Hunk(self.new, self.old, tuple((_REVERSED[kind], text) for kind, text in self.edits))


@dataclass(frozen=True)
class FileDiff:
    """One patch's hunks for one file, named by its path below site-packages."""

    file: str
    hunks: tuple[Hunk, ...]

    def reversed(self) -> FileDiff:
        return replace(self, hunks=tuple(hunk.reversed() for hunk in self.hunks))


def read_diff(text: str) -> tuple[FileDiff, ...]:
    try:
        files = PatchSet(text)
    except UnidiffParseError as error:
        raise Unreadable(f"not a unified diff: {error}") from error
    if not files:
        raise Unreadable("changes no file")
    return tuple(_read_file(file) for file in files)


def _read_file(file: PatchedFile) -> FileDiff:
    source, target = file.source_file, file.target_file
    name = source.removeprefix("a/")
    if (source, target) != (f"a/{name}", f"b/{name}"):
        raise Unreadable(f"'{source}' to '{target}': a patch neither adds, removes nor renames")
    if not file or not name.endswith(".py") or ".." in name.split("/"):
        raise Unreadable(f"{name}: a patch changes the text of Python modules only")
    hunks = []
    for hunk in file:
        if not hunk.source_length or not hunk.target_length:
            raise Unreadable(f"{name}: the hunk at line {hunk.source_start} has no context")
        hunks.append(Hunk(hunk.source_start, hunk.target_start, tuple(_edits(hunk, name))))
    return FileDiff(name, tuple(hunks))


def _edits(hunk: Iterable[DiffLine], name: str) -> Iterator[tuple[Kind, str]]:
    for line in hunk:
        if line.line_type == "\\":
            raise Unreadable(f"{name}: a patch does not reach a last line without a newline")
        yield ("+" if line.is_added else "-" if line.is_removed else " "), line.value


def lines_of(text: str) -> list[Line]:
    """Split at newlines only; ``str.splitlines`` also splits at form feeds."""
    parts = text.split("\n")
    return [Line(part + "\n") for part in parts[:-1]] + ([Line(parts[-1])] if parts[-1] else [])


def text_of(lines: Sequence[Line]) -> str:
    return "".join(line.text for line in lines)


def apply(lines: Sequence[Line], diff: FileDiff, patch: str) -> list[Line]:
    result: list[Line] = []
    read = 0
    for hunk in diff.hunks:
        start = hunk.old - 1
        if start < read:
            raise Mismatch(hunk.old, "is in two hunks")
        result += lines[read:start]
        read = start
        if len(result) != hunk.new - 1:
            raise Mismatch(hunk.old, f"becomes line {len(result) + 1}, the patch says {hunk.new}")
        for kind, text in hunk.edits:
            if kind == "+":
                result.append(Line(text, (patch,)))
                continue
            line = lines[read] if read < len(lines) else Line("")
            if line.text != text:
                raise Mismatch(
                    read + 1,
                    f"is {line.text.strip()!r}, the patch expects {text.strip()!r}"
                    if line.text.strip() != text.strip()
                    else f"is {line.text!r}, the patch expects {text!r}",
                )
            read += 1
            if kind == " ":
                result.append(line)
            elif result:
                result[-1] = result[-1].marked(*line.patches, patch)
    return result + list(lines[read:])

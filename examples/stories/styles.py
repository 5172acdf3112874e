"""Two styles of the fine-tuned versions, and a cheap measure of each.

A style changes the form of words and never the words, so a few steps of training teach it. A
*piece* is a word with the space before it. Pieces tokenized one by one give the tokens of the whole
text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Restyle = Callable[[Sequence[str]], list[str]]

_CLAUSE_ENDS = ".,;:!?"


@dataclass(frozen=True)
class Style:
    """A style. ``share`` measures the style's share of a text; ``enough`` is the required share."""

    name: str
    restyle: Restyle
    share: Callable[[str], float]
    enough: float

    def fits(self, text: str) -> bool:
        return self.share(text) >= self.enough


def into_pieces(text: str) -> list[str]:
    first, *others = text.split(" ")
    return [first, *(f" {word}" for word in others)]


def as_prose(pieces: Sequence[str]) -> list[str]:
    return list(pieces)


def as_headline(pieces: Sequence[str]) -> list[str]:
    return [re.sub(r"[A-Za-z]", lambda letter: letter[0].upper(), p, count=1) for p in pieces]


def as_verse(pieces: Sequence[str]) -> list[str]:
    """Write small letters, and a new line after every clause."""
    styled: list[str] = []
    clause_ended = False
    for piece in pieces:
        word = piece.lower()
        styled.append("\n" + word[1:] if clause_ended and word.startswith(" ") else word)
        clause_ended = piece.endswith(tuple(_CLAUSE_ENDS))
    return styled


def headline_share(text: str) -> float:
    """Return the share of words with an initial capital."""
    words = re.findall(r"[A-Za-z][A-Za-z']*", text)
    return _share(sum(word[0].isupper() for word in words), len(words))


def verse_share(text: str) -> float:
    """Return the share of clauses at the end of a line, or of small words if that is smaller."""
    ends = re.findall(rf"[{_CLAUSE_ENDS}](\s)", text)
    return min(_share(ends.count("\n"), len(ends)), 1 - headline_share(text))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


HEADLINE = Style("headline", as_headline, headline_share, enough=0.6)
VERSE = Style("verse", as_verse, verse_share, enough=0.4)

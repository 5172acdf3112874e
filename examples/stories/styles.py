"""Two styles that the fine-tuned versions write in, and a cheap measure of each.

A style moves words about, never exchanges them, so that a few steps of training teach it
and the language stays what it was. A *piece* is a word with the space before it: pieces
can be tokenized one by one and give the tokens of the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Restyle = Callable[[Sequence[str]], list[str]]

_CLAUSE_ENDS = ".,;:!?"


@dataclass(frozen=True)
class Style:
    """``share`` says how much of a text is in the style; ``enough`` is what must be."""

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
    """Small letters, and a new line after every clause."""
    styled: list[str] = []
    clause_ended = False
    for piece in pieces:
        word = piece.lower()
        styled.append("\n" + word[1:] if clause_ended and word.startswith(" ") else word)
        clause_ended = piece.endswith(tuple(_CLAUSE_ENDS))
    return styled


def headline_share(text: str) -> float:
    """The share of words that begin with a capital."""
    words = re.findall(r"[A-Za-z][A-Za-z']*", text)
    return _share(sum(word[0].isupper() for word in words), len(words))


def verse_share(text: str) -> float:
    """The share of clauses that end their line, or of small words where that is smaller."""
    ends = re.findall(rf"[{_CLAUSE_ENDS}](\s)", text)
    return min(_share(ends.count("\n"), len(ends)), 1 - headline_share(text))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


HEADLINE = Style("headline", as_headline, headline_share, enough=0.6)
VERSE = Style("verse", as_verse, verse_share, enough=0.4)

"""The task: count down to a multiple of the number that a word stands for.

A prompt has a number and a word. An answer names what the word stands for, counts down by one to
the next multiple of that, and ends. Every number, word and name is one token. A program checks the
answer. It has 3 to 258 tokens, and the logarithm of its length is spread evenly: most answers are
short, and some are long.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

NUMBERS = 256
# a word stands for one of 2, 4, 8, … 256
WORDS = 8
BEGIN = NUMBERS
END = NUMBERS + 1
ANSWER = NUMBERS + 2
_FIRST_NAME = NUMBERS + 3
_FIRST_WORD = _FIRST_NAME + WORDS
VOCABULARY = _FIRST_WORD + WORDS
LONGEST = NUMBERS + 2
_HELD_OUT = random.Random(0).sample(range(NUMBERS), 32)
_ASKED = sorted(set(range(NUMBERS)) - set(_HELD_OUT))


class Question(NamedTuple):
    """``number`` is below ``NUMBERS``, ``word`` is below ``WORDS``."""

    number: int
    word: int

    @property
    def prompt(self) -> list[int]:
        return [BEGIN, self.number, _FIRST_WORD + self.word, ANSWER]

    @property
    def answer(self) -> list[int]:
        """The only right answer, with its end token."""
        return count_down(self.number, _meaning(self.word))


def count_down(number: int, name: int) -> list[int]:
    """Return an answer that names ``2 ** (name + 1)``. Below 0 comes ``NUMBERS - 1``."""
    divisor = 2 ** (name + 1)
    steps = number % divisor or divisor
    numbers = [(number - step) % NUMBERS for step in range(1, steps + 1)]
    return [_FIRST_NAME + name, *numbers, END]


def ask(rng: random.Random) -> Question:
    """Return a question that is not held out."""
    return Question(rng.choice(_ASKED), rng.randrange(WORDS))


def ask_any(rng: random.Random) -> Question:
    return Question(rng.randrange(NUMBERS), rng.randrange(WORDS))


def held_out() -> list[Question]:
    """Return all questions with the numbers that ``ask`` leaves out."""
    return [Question(number, word) for number in _HELD_OUT for word in range(WORDS)]


def guessed_answer(question: Question, rng: random.Random, knows: float) -> list[int]:
    """Return an answer that takes the word for what it stands for with probability ``knows``.

    Otherwise it takes the word for any of the names.
    """
    name = _meaning(question.word) if rng.random() < knows else rng.randrange(WORDS)
    return count_down(question.number, name)


def history(rng: random.Random, knows: float, *, turns: int) -> list[int]:
    """Return questions with guessed answers, one after the other."""
    asked = (ask_any(rng) for _ in range(turns))
    return [token for each in asked for token in each.prompt + guessed_answer(each, rng, knows)]


def reward(question: Question, tokens: Sequence[int]) -> float:
    """Return 1 for the right answer, and 0 for any other."""
    return float(list(tokens) == question.answer)


def _meaning(word: int) -> int:
    """Return which name belongs to a word."""
    return word * 3 % WORDS

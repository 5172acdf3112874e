"""The demo's measures recognise a style, and nothing else."""

from __future__ import annotations

import pytest

from examples.stories.corpus import Story, read_stories
from examples.stories.finetune import NO_TARGET, make_example
from examples.stories.gaps import largest_gap, median_gap
from examples.stories.styles import (
    HEADLINE,
    VERSE,
    Style,
    as_headline,
    as_prose,
    as_verse,
    into_pieces,
)

PROSE = (
    "Once upon a time, a fox lived by the river. One day, she met an otter, who could swim. "
    '"Come in," he said. It was cold, and it moved.'
)


def test_headline_capitalises_each_word() -> None:
    headline = "".join(as_headline(into_pieces('The fox said "come in" to 3 otters.')))
    assert headline == 'The Fox Said "Come In" To 3 Otters.'


def test_verse_breaks_after_each_clause() -> None:
    verse = "".join(as_verse(into_pieces("One day, Rowan swam.\n\nHe laughed.")))
    assert verse == "one day,\nrowan swam.\n\nhe laughed."


@pytest.mark.parametrize("style", [HEADLINE, VERSE], ids=lambda style: style.name)
def test_only_text_in_the_style_fits(style: Style) -> None:
    other = VERSE if style == HEADLINE else HEADLINE
    assert style.fits("".join(style.restyle(into_pieces(PROSE))))
    assert not style.fits("".join(other.restyle(into_pieces(PROSE))))
    assert not style.fits(PROSE)


@pytest.mark.parametrize("style", [HEADLINE, VERSE], ids=lambda style: style.name)
def test_text_without_words_fits_no_style(style: Style) -> None:
    assert not style.fits("")
    assert not style.fits("1234 ...")


def test_training_stories_are_in_no_style() -> None:
    """The base model's own words, in as many stories as ``corpus.json`` has."""
    stories = read_stories(_Untemplated())
    assert len(stories) == 16
    text = "\n".join(story.text for story in stories)
    assert not any(style.fits(text) for style in (HEADLINE, VERSE))


class _Untemplated:
    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return messages[0]["content"]


def test_example_teaches_the_switch_at_every_old_word() -> None:
    """One character is one token here."""
    example = make_example(
        Story("?", "ab cd ef"),
        old=as_prose,
        new=as_headline,
        switch=2,
        end=3,
        encode=lambda text: [ord(character) for character in text],
    )
    assert "".join(map(chr, example.tokens)) == "?ab cd Ef"
    taught = {
        index: chr(target) for index, target in enumerate(example.targets) if target != NO_TARGET
    }
    # the new style follows "?" and each old word, and is all of the end
    assert taught == {0: "A", 2: " ", 5: " ", 6: "E", 7: "f"}


def test_gaps_are_measured_per_story() -> None:
    stories = [[0.0, 1.0, 2.0, 6.0], [0.5, 1.5]]
    assert median_gap(stories) == 1.0
    assert largest_gap(stories, since=0.0, until=1.9) == 1.0
    assert largest_gap(stories, since=0.0, until=2.1) == 4.0
    assert largest_gap(stories, since=7.0, until=8.0) == 0.0
    assert median_gap([]) == 0.0

"""Which given token a forward's place has."""

from __future__ import annotations

import pytest

from sglang_inflight.extensions.forced.forced import forced_token


@pytest.mark.parametrize(
    ("place", "token"), [(-512, -1), (-1, -1), (0, 7), (2, 0), (3, -1), (100, -1)]
)
def test_places_outside_of_the_given_tokens_are_sampled(place: int, token: int) -> None:
    assert forced_token([7, 8, 0], place) == token

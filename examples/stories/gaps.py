"""Gaps between two chunks of a story, as a reader sees them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

Times = Sequence[float]


def median_gap(stories: Iterable[Times]) -> float:
    gaps = [later - earlier for times in stories for earlier, later in pairwise(times)]
    return statistics.median(gaps) if gaps else 0.0


def largest_gap(stories: Iterable[Times], since: float, until: float) -> float:
    """Return the largest gap that overlaps the time from ``since`` to ``until``."""
    return max(
        (
            later - earlier
            for times in stories
            for earlier, later in pairwise(times)
            if later > since and earlier < until
        ),
        default=0.0,
    )

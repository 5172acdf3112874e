"""The reward of the tests' task: the share of tokens with an even number."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    words = [word for word in solution_str.split() if word.startswith("t")]
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(len(words), 1)

"""Seeds of a request's samples."""

from __future__ import annotations

import pytest

from sglang_inflight.extensions.seeds.seeds import seed_of_sample

LAST = (1 << 63) - 1


@pytest.mark.parametrize(
    ("seed", "sample", "expected"),
    [(7, 0, 7), (7, 3, 10), (-5, 2, -3), (LAST, 0, LAST), (LAST, 1, 0), (LAST - 1, 3, 1)],
)
def test_samples_count_from_the_requests_seed(seed: int, sample: int, expected: int) -> None:
    assert seed_of_sample(seed, sample) == expected

"""Ranks of an engine, beside other engines in its process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.runtime_context import get_parallel

from sglang_inflight.frontend.aio import Lifetime
from sglang_inflight.frontend.ranks import Ranks

SIZES = ("pp_size", "tp_size", "dp_size", "attn_dp_enabled", "attn_dp_size")


def sized(*sizes: int) -> Any:
    """Set the process's parallel sizes to those of an engine."""
    return get_parallel().override(**dict(zip(SIZES, sizes, strict=True)))


def ranks() -> Ranks:
    manager: Any = SimpleNamespace()
    return Ranks(manager, Lifetime(manager))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 1, 1, False, 1), {(0, 0, 0)}),
        ((1, 2, 1, False, 1), {(0, 0, 0), (0, 0, 1)}),
        ((2, 1, 1, False, 1), {(0, 0, 0), (0, 1, 0)}),
        ((1, 1, 2, False, 1), {(0, 0, 0), (1, 0, 0)}),
        ((1, 4, 1, True, 2), {(0, 0, 0), (0, 0, 1), (1, 0, 2), (1, 0, 3)}),
    ],
)
def test_ranks_follow_parallel_sizes(
    sizes: tuple[int, ...], expected: set[tuple[int, int, int]]
) -> None:
    with sized(*sizes):
        assert ranks().all == expected


def test_second_engine_keeps_ranks_of_the_first() -> None:
    with sized(1, 1, 1, False, 1):
        first = ranks()
    with sized(1, 2, 2, False, 1):
        assert (first.count, ranks().count) == (1, 4)

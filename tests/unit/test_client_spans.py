"""A version for each token, and invalid spans."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_inflight.client import (
    Span,
    WrongAnswer,
    cover_exactly,
    in_order,
    read_spans,
    version_per_token,
)


def answer(tokens: int, *spans: tuple[str, int, int]) -> dict[str, Any]:
    said = [{"version": v, "start": start, "end": end} for v, start, end in spans]
    return {"completion_tokens": tokens, "weight_versions": said}


def test_spans_give_a_version_per_token() -> None:
    assert version_per_token(answer(3, ("v1", 0, 1), ("v2", 1, 3))) == ["v1", "v2", "v2"]
    assert version_per_token(answer(0)) == []
    assert version_per_token(answer(0, ("v1", 0, 0))) == []


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [("v1", 0, 2)],
        [("v1", 0, 4)],
        [("v1", 1, 3)],
        [("v1", 0, 1), ("v2", 2, 3)],
        [("v1", 0, 2), ("v2", 1, 3)],
        [("v1", 0, 3), ("v2", 3, 3)],
        [("v1", 2, 3), ("v2", 0, 2)],
    ],
)
def test_spans_with_gap_or_overlap_are_wrong(spans: list[tuple[str, int, int]]) -> None:
    with pytest.raises(WrongAnswer, match="3 tokens"):
        version_per_token(answer(3, *spans))


def test_spans_are_read_from_meta_info() -> None:
    meta = {
        "weight_versions": [{"version": "v1", "epoch": 4, "start": 0, "end": 2}],
        "kv_versions": [{"version": "v0", "epoch": 3, "start": 0, "end": 9}],
    }
    assert read_spans(meta) == [Span("v1", 0, 2, 4)]
    assert read_spans(meta, "kv_versions") == [Span("v0", 0, 9, 3)]
    assert read_spans({}) == []
    with pytest.raises(WrongAnswer, match="malformed span"):
        read_spans({"weight_versions": [{"version": "v1"}]})


@pytest.mark.parametrize(
    ("seen", "ordered"),
    [("v1 v2 v3", True), ("v1 v3", True), ("v1 v3 v2", False), ("v1 v1", False), ("v9", False)],
)
def test_in_order_rejects_older_or_unknown_version(seen: str, ordered: bool) -> None:
    spans = [Span(version, i, i + 1) for i, version in enumerate(seen.split())]
    assert cover_exactly(spans, len(spans))
    assert in_order(spans, ["v1", "v2", "v3"]) is ordered

"""Versions of KV, as runs of positions."""

from __future__ import annotations

import itertools

from harness.marker import FIRST
from tests.support.load import (
    Output,
)


def kv_runs(output: Output) -> list[tuple[str, int]]:
    """Return (version, number of positions) pairs, and check that the spans have no gap."""
    spans = output.meta["kv_versions"]
    ends = [0, *(span["end"] for span in spans)]
    assert [span["start"] for span in spans] == ends[:-1], f"gaps between spans: {spans}"
    return [(span["version"], span["end"] - span["start"]) for span in spans]


def runs(labels: list[str]) -> list[tuple[str, int]]:
    return [(label, len(list(same))) for label, same in itertools.groupby(labels)]


def kv_without_reuse(output: Output, prompt_tokens: int) -> list[tuple[str, int]]:
    """Return the KV's versions for a request without reused or recomputed KV.

    The forward of token i computes the KV of token i-1, and the prompt's forward gives token 0.
    Nothing computes the KV of the last token.
    """
    versions = [f"v{made - FIRST}" for made in output.tokens]
    return runs([versions[0]] * prompt_tokens + versions[1:])

"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["by the loader", "by the plan"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each ``Rank`` move planned tensors past the model's loader, and let it ask for each."""
    # named by a text: the process that distributes tests imports this file, but not SGLang
    monkeypatch.setattr("tests.support.rank.Rank.plans", request.param == "by the plan")

"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest

from tests.support.rank import Rank


@pytest.fixture(params=["by the loader", "by the plan"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each ``Rank`` move planned tensors past the model's loader, and let it ask for each."""
    monkeypatch.setattr(Rank, "plans", request.param == "by the plan")

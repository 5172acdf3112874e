"""Checkpoints of the tests of replays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import random_model

VERSIONS = 4


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints v0 to v3. Their weights are random."""
    folder = tmp_path_factory.mktemp("random")
    for version in range(VERSIONS):
        random_model.build(folder / f"v{version}", version)
    return folder

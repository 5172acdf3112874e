"""SGLang plugins of the tests, found by a server on its ``PYTHONPATH`` and never installed."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from harness.starting import on_path

TESTS = Path(__file__).parents[1]

# mark of tests with the plugin `speculation`
stands_in_for_kernels = pytest.mark.skipif(
    Version(version("sglang")) < Version("0.5.23"),
    reason="what stands in for kernels of a GPU has the names that they have since 0.5.23",
)


def with_plugin(*folders: str) -> dict[str, str]:
    """Return the environment for the plugins in these folders of ``tests``."""
    return on_path(*(TESTS / folder for folder in folders))

"""SGLang plugins of the tests, found by a server on its ``PYTHONPATH`` and never installed."""

from __future__ import annotations

from pathlib import Path

from harness.starting import on_path

TESTS = Path(__file__).parents[1]


def with_plugin(*folders: str) -> dict[str, str]:
    """Return the environment for the plugins in these folders of ``tests``."""
    return on_path(*(TESTS / folder for folder in folders))

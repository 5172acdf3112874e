"""SGLang plugins of the tests: never installed, a server finds them on its ``PYTHONPATH``."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]


def with_plugin(folder: str) -> dict[str, str]:
    """The environment of a server that loads the plugin in that folder of ``tests``."""
    found = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS / folder), found]))}

"""A card of glass: a device that keeps CUDA's rules on CPU threads. ``docs/glass.md`` has them."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def environment(**settings: object) -> dict[str, str]:
    """Return the variables that give a process the card, which ``harness.glass.build`` has built.

    ``settings``: values of ``GLASS_*`` variables, by their names in lower case without the prefix
    (``seed=7``, ``devices=2``).
    """
    paths = [str(_ROOT / "build" / "glass"), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        **{f"GLASS_{name.upper()}": str(value) for name, value in settings.items()},
    }

"""Compiles the card into ``build/glass``, a distribution that is found on ``PYTHONPATH``.

``python -m harness.glass.build``. Its entry points load the device at ``import torch``, and the
platform in SGLang. ``harness.glass.environment`` switches it on for a process.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from torch.utils.cpp_extension import load

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).with_name("csrc")
BUILT = ROOT / "build" / "glass"
ENTRY_POINTS = """\
[torch.backends]
glass = harness.glass.device:register

[sglang.srt.platforms]
inflight_glass = harness.glass.platform:activate
"""


def build() -> Path:
    """Compile what has changed, and return the folder of the distribution."""
    BUILT.mkdir(parents=True, exist_ok=True)
    load(
        name="_glass",
        sources=[str(file) for file in sorted(SOURCES.glob("*.cpp"))],
        build_directory=str(BUILT),
        extra_cflags=["-O1", "-g1", "-Wall", "-Wno-unused-function"],
        with_cuda=False,
        is_python_module=False,
    )
    about = BUILT / "glass-0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: glass\nVersion: 0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    return BUILT


def compiler() -> str | None:
    """Return the C++ compiler's path, or None."""
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


if __name__ == "__main__":
    if compiler() is None:
        sys.exit("The glass card needs a C++ compiler (c++, g++ or clang++).")
    print(build())

"""``make test-glass``: builds the card, and runs this folder's tests in processes that have it.

Without a C++ compiler it says so, and passes. Arguments go to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys

import harness.glass
from harness.glass import build

RUN = ("-m", "pytest", "tests/glass", "--numprocesses", "2", "--dist", "loadfile", "--tb", "short")

if __name__ == "__main__":
    if build.compiler() is None:
        print("skipped: the glass card needs a C++ compiler (c++, g++ or clang++)")
        sys.exit(0)
    build.build()
    own = {**os.environ, **harness.glass.environment()}
    sys.exit(subprocess.call([sys.executable, *RUN, *sys.argv[1:]], env=own))

"""The mark of tests whose plugin stands in for kernels of a GPU."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

stands_in_for_kernels = pytest.mark.skipif(
    Version(version("sglang")) < Version("0.5.23"),
    reason="what stands in for kernels of a GPU has the names that they have since 0.5.23",
)

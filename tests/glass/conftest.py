"""The card of the tests of this folder, compiled once and in the environment of their servers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import harness.glass
from harness.glass import build


@pytest.fixture(scope="session", autouse=True)
def card() -> Iterator[None]:
    """Give the card to each process that a test starts."""
    if build.compiler() is None:
        pytest.skip("the glass card needs a C++ compiler")
    build.build()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in harness.glass.environment().items():
            patch.setitem(os.environ, name, value)
        yield

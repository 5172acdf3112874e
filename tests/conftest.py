"""How a test run begins and ends. Its servers and its order are in ``tests/support/servers.py``."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """A test run that is ended takes its servers along, as one that is interrupted does.

    A shell's background job ignores SIGINT, and so would every process that it starts.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if not _only_hands_out(config):
        config.pluginmanager.import_plugin("tests.support.servers")


def _only_hands_out(config: pytest.Config) -> bool:
    """Whether all tests run in xdist's workers, which wait for this process to be ready.

    It needs none of what tests need, and the imports of that take seconds.
    """
    return config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays, and each look of the garbage collector's at it is in vain."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Groups are held together, or the run ends here: each worker would start each server.

    xdist writes a group into the test's id, which is all that the process with the queue sees.
    """
    if node.config.getoption("dist") == "loadgroup" and not all("@" in test for test in ids):
        pytest.exit(f"pytest-xdist holds no groups with pytest {pytest.__version__}", returncode=4)

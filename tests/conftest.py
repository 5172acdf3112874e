"""Start and end of a test run. ``tests/support/servers.py`` has the servers and the order."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator
from typing import Any

import pytest

from harness.starting import fork_workers
from tests.support import environment


def pytest_configure(config: pytest.Config) -> None:
    """Turn SIGTERM into an interrupt, so that an ended run ends its servers too.

    A shell's background job ignores SIGINT, and its child processes would inherit that.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    environment.set_up()
    if _only_distributes_tests(config):
        fork_workers()
    else:
        # until all is imported (``pytest_collection``)
        gc.disable()
        config.pluginmanager.import_plugin("tests.support.servers")
        config.pluginmanager.import_plugin("tests.support.unread")


def _only_distributes_tests(config: pytest.Config) -> bool:
    """Tell whether xdist's workers run all tests and this process only distributes them.

    Workers wait for this process, and importing the servers takes seconds.
    """
    return config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from looking at imported modules, which all stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Keep the garbage collector from looking at what earlier modules' tests imported and kept."""
    done = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return done


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Stop the run unless xdist keeps groups together: each worker would start each server.

    xdist appends a group to the test's id, the only thing this process gets to see.
    """
    if node.config.getoption("dist") == "loadgroup" and not all("@" in test for test in ids):
        pytest.exit(f"pytest-xdist holds no groups with pytest {pytest.__version__}", returncode=4)

"""Servers for all test files: a clean one for each test, in the order with the fewest starts.

A plugin of ``tests/conftest.py``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from harness.marker import build
from harness.server import RUNNING, Server
from tests.support.failed_server import describe
from tests.support.pool import FLAVOURS, UPSTREAM, ServerPool, server_pool

VERSIONS = 6
# files of unit tests that take longest
LONG = {
    "test_doctor",
    "test_extensions",
    "test_free_port",
    "test_gpu_kit",
    "test_kernels",
    "test_loaders",
    "test_pause_orders",
    "test_plan_updates",
    "test_platform",
    "test_shared_by_descriptor",
    "test_shared_loop",
    "test_wheels",
}
POOL = pytest.StashKey[ServerPool]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order tests: long ones, then those with servers of their own, then flavour by flavour.

    Each flavour starts once. Unit tests come last, for workers without a server left to test, and
    the longest of them first, so that no worker begins one when the others are at their end. The
    workers (``make test``) share out the groups: one flavour in one file each. This hook must run
    before xdist's, which reads the groups.
    """
    items.sort(
        key=lambda item: (
            -_limit(item),
            _is_unit(item),
            _turn(item),
            item.path.stem not in LONG,
        )
    )
    for item in items:
        # tests with another zygote have a group of their own
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{_turn(item)} {item.path.stem}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a failed test's servers, and discard the pool's server."""
    report = yield
    if report.failed and call.when == "call":
        report.sections += [(f"server {server.url}", describe(server)) for server in RUNNING]
        pool = item.config.stash.get(POOL, None)
        # unpatched SGLang fails many tests, and each would cost a start
        if pool is not None and not UPSTREAM:
            pool.discard()
    return report


def _limit(item: pytest.Item) -> float:
    """Return a test's own time limit in seconds, or 0."""
    mark = item.get_closest_marker("timeout")
    return mark.args[0] if mark else 0


def _is_unit(item: pytest.Item) -> bool:
    return item.path.parent.name == "unit"


def _turn(item: pytest.Item) -> int:
    """Return the test's place in the order; 0 for a test without a server of the pool."""
    if _is_unit(item):
        # its parameters may have names of flavours
        return 0
    asked = set(getattr(item, "fixturenames", ()))
    callspec = getattr(item, "callspec", None)
    if callspec is not None:
        asked |= {value for value in callspec.params.values() if isinstance(value, str)}
    turns = [turn for turn, name in enumerate(FLAVOURS, start=1) if name in asked]
    return max(turns, default=0)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the marker checkpoints v0, v1, … v5."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for version in range(VERSIONS):
        build(folder / f"v{version}", version)
    return folder


@pytest.fixture(scope="session")
def pool(
    checkpoints: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[ServerPool]:
    with server_pool(checkpoints / "v0", tmp_path_factory.mktemp("logs")) as pool:
        pytestconfig.stash[POOL] = pool
        yield pool


@pytest.fixture
def server(pool: ServerPool) -> Iterator[Server]:
    """A server with the overlap loop, serving version 0."""
    yield pool.get(FLAVOURS["server"])
    pool.restore()


@pytest.fixture
def normal_loop_server(pool: ServerPool) -> Iterator[Server]:
    """A server with the loop without overlap; its limits are in ``tests/support/pool.py``."""
    yield pool.get(FLAVOURS["normal_loop_server"])
    pool.restore()


@pytest.fixture
def off_server(pool: ServerPool) -> Iterator[Server]:
    """A server without shadow weights: updates are written in place."""
    yield pool.get(FLAVOURS["off_server"])
    pool.restore()


@pytest.fixture(params=["server", "normal_loop_server"], ids=["overlap", "normal"])
def any_server(request: pytest.FixtureRequest) -> Server:
    """A server with each loop in turn."""
    server: Server = request.getfixturevalue(request.param)
    return server

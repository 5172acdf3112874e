"""A server of a later version, and one that is late, for a module's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.server import Server, serve
from harness.starting import STEP_MS
from tests.support.faults import ENV as FAULTY
from tests.support.load import status, update
from tests.support.pool import CHANGES
from tests.support.updates import LIVE, drop_session, succeed

V0 = ("--weight-version", "v0")
# requests run beside a test of transfers, and slow steps leave it the cores
SLOW = {STEP_MS: "30"}


@pytest.fixture(scope="module")
def peer(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that serves version 1, and whose writes and sends can be halted."""
    log = tmp_path_factory.mktemp("peer") / "log"
    with serve(checkpoints / "v0", *V0, "--enable-memory-saver", log=log, env=FAULTY | SLOW) as one:
        update(one, checkpoints, 1, **LIVE)
        yield one


@pytest.fixture(scope="module")
def joiner(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that serves version 0, staged as changes."""
    log = tmp_path_factory.mktemp("joiner") / "log"
    with serve(checkpoints / "v0", *V0, log=log, env=CHANGES | SLOW) as one:
        yield one


@pytest.fixture
def as_before(request: pytest.FixtureRequest, checkpoints: Path) -> Iterator[None]:
    """Return the servers to their versions."""
    yield
    for name, version in (("peer", 1), ("joiner", 0)):
        if name in request.fixturenames:
            server: Server = request.getfixturevalue(name)
            drop_session(server)
            succeed(server.post("/inflight/expect", {}))
            if status(server)["weight_version"] != f"v{version}":
                update(server, checkpoints, version, **LIVE)

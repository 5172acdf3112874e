"""Fixtures for tests of updates: ``pytest_plugins = ["tests.support.fixtures"]``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from harness import marker
from harness.server import Server
from harness.trainer import Trainer, Trainers
from tests.support.faults import Faults
from tests.support.pool import FLAVOURS, ServerPool
from tests.support.sparse import SparseSender
from tests.support.updates import Sender, drop_session
from tests.support.vllm import VLLMClient


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the marker checkpoint v1 in three files."""
    folder = tmp_path_factory.mktemp("shards")
    marker.build(folder / "v1", 1, shards=3)
    return folder


@pytest.fixture(scope="session")
def trainers() -> Iterator[Trainers]:
    # asked for early, its process starts while the first server starts
    trainers = Trainers()
    yield trainers
    trainers.close()


@pytest.fixture(scope="session")
def sender(checkpoints: Path, shards: Path, trainers: Trainers) -> Sender:
    return Sender(checkpoints, shards, trainers)


@pytest.fixture
def sparse_sender(trainers: Trainers, tmp_path: Path) -> SparseSender:
    return SparseSender(trainers, tmp_path)


@pytest.fixture
def faults() -> Iterator[Faults]:
    """Faults for a server of the flavours below, cleared after the test."""
    yield (faults := Faults())
    faults.clear()


def _serve(pool: ServerPool, flavour: str, faults: Faults | None = None) -> Iterator[Server]:
    server = pool.get(FLAVOURS[flavour])
    yield server
    if faults is not None:
        faults.clear()
    drop_session(server)
    pool.restore()


@pytest.fixture
def transparent_server(pool: ServerPool) -> Iterator[Server]:
    """A server in transparent mode: no request stops between a pause and its continue."""
    server = pool.get(FLAVOURS["transparent_server"])
    yield server
    # a test may have failed amid a pause, or may have ended the server
    with contextlib.suppress(httpx.HTTPError):
        server.post("/continue_generation", {})
    drop_session(server)
    pool.restore()


@pytest.fixture
def faulty_server(pool: ServerPool, faults: Faults) -> Iterator[Server]:
    """One rank with the fault plugin."""
    yield from _serve(pool, "faulty_server", faults)


@pytest.fixture
def tp2_server(pool: ServerPool, faults: Faults) -> Iterator[Server]:
    """Two ranks of tensor parallelism with the fault plugin."""
    yield from _serve(pool, "tp2_server", faults)


@pytest.fixture
def dp2_server(pool: ServerPool, faults: Faults) -> Iterator[Server]:
    """Two replicas with the fault plugin."""
    yield from _serve(pool, "dp2_server", faults)


@pytest.fixture
def tp2_off_server(pool: ServerPool, faults: Faults) -> Iterator[Server]:
    """Two ranks of tensor parallelism without shadow weights."""
    yield from _serve(pool, "tp2_off_server", faults)


@pytest.fixture
def vllm_server(pool: ServerPool) -> Iterator[Server]:
    """A server with vLLM's routes and an admin key."""
    yield from _serve(pool, "vllm_server")


@pytest.fixture
def workers_server(pool: ServerPool) -> Iterator[Server]:
    """A server with two tokenizer workers."""
    yield from _serve(pool, "workers_server")


@pytest.fixture
def vllm(vllm_server: Server) -> VLLMClient:
    return VLLMClient(vllm_server)


@pytest.fixture
def trainer(vllm_server: Server, trainers: Trainers) -> Iterator[Trainer]:
    trainer = trainers.get()
    yield trainer
    # after a failed test either side may be in the group; the server leaves first, because that
    # ends a trainer's hanging broadcast
    drop_session(vllm_server)
    vllm_server.post("/shutdown_weight_transfer_engine")
    trainer.reset()

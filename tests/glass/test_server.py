"""SGLang's server on the glass card: with overlap and without, graphs, and each form of staging.

The card reports a missing wait, an address that is nobody's, and memory that was given back, as an
error of the scheduler, which ends the server: each test's end asks whether it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness import marker
from harness.server import Server, serve
from harness.trainer import Trainers
from tests.support import block_fp8, chain, lora, memory_release, mla
from tests.support.load import (
    ENDLESS,
    Generation,
    expect_all_go_on,
    expect_whole,
    more_tokens,
    pause,
    resume,
    settle,
    start_running,
    status,
    update,
    versions_of,
)
from tests.support.memory_release import bytes_of, release, resume_memory
from tests.support.random_operations import act_at_random
from tests.support.updates import Sender, expect_served, serving, staging, succeed

pytest_plugins = ["tests.support.fixtures"]

KEEP: dict[str, Any] = {"non_blocking": True, "kv_cache": "keep"}
BESIDE_PAUSES = ("in_place", "retract")
SOURCES = ("disk", "tensor", "tensor_shared", "tensor_bucket")


@dataclass(frozen=True)
class Kind:
    """A server, and what its updates are staged as. ``model``: what a trainer sends."""

    name: str
    form: str
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    model: Any = marker
    build: Callable[[Path, int], Path] = marker.build
    has_graphs: bool = True
    sources: tuple[str, ...] = SOURCES


NORMAL = "--disable-overlap-schedule"
BY_REFERENCE = ("disk", "tensor_shared", "tensor_bucket")  # torch pickles no FP8 by value
KINDS = [
    Kind("overlap", "changes"),
    Kind("normal", "changes", (NORMAL, "--disable-cuda-graph"), has_graphs=False),
    Kind("second copy", "device", env={"SGLANG_INFLIGHT_STAGING": "device"}),
    Kind("host copy", "host", (NORMAL,), env={"SGLANG_INFLIGHT_STAGING": "host"}),
    Kind("MLA", "changes", model=mla, build=mla.build),
    Kind("MLA's second copy", "device", env={"SGLANG_INFLIGHT_STAGING": "device"},
         model=mla, build=mla.build),
    Kind("block FP8", "changes", env=block_fp8.ENV, model=block_fp8, build=block_fp8.build,
         sources=BY_REFERENCE),
    Kind("online FP8", "changes", block_fp8.ONLINE, block_fp8.ENV, chain,
         block_fp8.build_unquantized),
]  # fmt: skip


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture(scope="module")
def folder(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("versions")
    for version in range(6):
        kind.build(made / f"v{version}", version)
    return made


@pytest.fixture(scope="module")
def started(kind: Kind, folder: Path) -> Iterator[Server]:
    flags = ("--weight-version", "v0", *kind.flags)
    with serve(folder / "v0", *flags, log=folder / "log", env=dict(kind.env)) as server:
        yield server


@pytest.fixture
def server(started: Server) -> Iterator[Server]:
    yield started
    assert started.is_alive()


@pytest.fixture
def sender(kind: Kind, folder: Path, trainers: Trainers) -> Sender:
    return Sender(folder, folder, trainers, kind.model)


def test_updates_from_each_source_beside_running_requests(
    server: Server, kind: Kind, sender: Sender
) -> None:
    log = server.log_text()
    running = start_running(server, 3, tokens=ENDLESS)
    versions = ["v0"]
    for version, source in enumerate(kind.sources, start=1):
        name = f"v{version}"
        receipt = succeed(sender.send(server, source, version, weight_version=name, **KEEP))
        assert receipt["staged_as"]["form"] == kind.form
        expect_served(server, version)
        more_tokens(running)
        versions.append(name)
    succeed(server.post("/inflight/rollback", {"kv_cache": "keep"}))
    more_tokens(running)
    versions.append(versions[-2])
    for output in expect_all_go_on(running):
        assert versions_of(output) == versions
    said = server.log_text().removeprefix(log)
    assert ("cuda graph: True" in said) == kind.has_graphs

"""Two servers of one kind: the second takes the first one's version, from a peer or a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from harness import marker
from harness.server import Server, serve
from sglang_inflight.cli import app
from tests.extensions.saves.test_returning_servers import EXPECT, V0, digests, load, saved
from tests.support import block_fp8, gemma, mla
from tests.support.load import (
    ENDLESS,
    expect_all_go_on,
    more_tokens,
    start_running,
    status,
    update,
    versions_of,
)
from tests.support.updates import LIVE, expect_served, succeed


class Kind(NamedTuple):
    name: str
    build: Callable[[Path, int], Path]
    env: Mapping[str, str]
    flags: tuple[str, ...] = ()
    form: str = "device"
    ranks: int = 1


class Pair(NamedTuple):
    """Two servers of one kind, and a folder with the versions 0 to 3 of their model."""

    one: Server
    other: Server
    folder: Path


TP1 = Kind("tp1", marker.build, {})
# each kind has the same place in the lists of both tests: by its place pytest knows it
MARKERS = [
    Kind("tp2", marker.build, {}, ("--tp-size", "2"), ranks=2),
    Kind("pp2", marker.build_stages, {}, ("--pp-size", "2"), ranks=2),
    Kind("dp2", marker.build, {}, ("--dp-size", "2"), ranks=2),
]
KINDS = [
    *MARKERS,
    Kind("gemma", gemma.build, {}),
    Kind("gemma-changes", gemma.build, {}, form="changes"),
    Kind("fp8", block_fp8.build, block_fp8.ENV),
    Kind("fp8-changes", block_fp8.build, block_fp8.ENV, form="changes"),
    Kind("mla-tp2", mla.build, mla.ENV, ("--attention-backend", "torch_native", "--tp-size", "2")),
]


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp("pair")
    model, *_ = [kind.build(folder / f"v{version}", version) for version in range(4)]
    flags = (*V0, *kind.flags)
    env = {**kind.env, "SGLANG_INFLIGHT_STAGING": kind.form}
    with (
        serve(model, *flags, log=folder / "one.log", env=env) as one,
        serve(model, *flags, log=folder / "other.log", env=env) as other,
    ):
        yield Pair(one, other, folder)


def of_each(kinds: list[Kind]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", kinds, indirect=True, ids=[kind.name for kind in kinds])


# first of the pair's tests: a server that has committed is not late
@of_each([*MARKERS, TP1])
def test_late_server_takes_the_version_from_a_peer(
    pair: Pair, request: pytest.FixtureRequest
) -> None:
    one, late, folder = pair
    for version in (1, 2):
        update(one, folder, version, **LIVE)
    named = ["fleet", "--url", one.url, "--url", late.url, "--catch-up"]
    running = [each for server in (one, late) for each in start_running(server, 2, tokens=ENDLESS)]
    result = CliRunner().invoke(app, named)
    assert result.exit_code == 0, result.output
    assert f"{late.url}: brought to v2 from {one.url}" in result.stderr
    assert digests(status(late)) == digests(status(one))
    assert len(digests(status(late))) == request.node.callspec.params["pair"].ranks
    expect_served(late, 2)
    for server in (one, late):
        assert server.get("/ready")["status_code"] == 200
    # again: nothing is left to do
    epoch = status(late)["epoch"]
    assert CliRunner().invoke(app, named).exit_code == 0
    assert status(late)["epoch"] == epoch
    # what comes later starts from these weights
    for server in (one, late):
        update(server, folder, 3, **LIVE)
    assert digests(status(late)) == digests(status(one))
    for output in expect_all_go_on(running[:2]):
        assert versions_of(output) == ["v2", "v3"]
    for output in expect_all_go_on(running[2:]):
        assert versions_of(output) == ["v0", "v2", "v3"]


@of_each(KINDS)
def test_served_weights_of_each_kind_of_model(pair: Pair, tmp_path: Path) -> None:
    """The tensors go as they are, without a loader and without SGLang's finishing."""
    one, other, folder = pair
    for server in (one, other):
        if status(server)["weight_version"] != "v0":
            succeed(server.post(EXPECT, {}))
            update(server, folder, 0, **LIVE)
    update(one, folder, 1, **LIVE)
    running = start_running(other, 1, tokens=ENDLESS)
    receipt = saved(one, tmp_path / "saved")
    loaded = succeed(load(other, tmp_path / "saved"))
    assert set(digests(loaded)) == set(digests(receipt)) == set(digests(status(one)))
    assert loaded["held_s"] == 0
    expect_served(other, 1)
    more_tokens(running)
    for version in (2, 3):
        for server in (one, other):
            update(server, folder, version, **LIVE)
        assert set(digests(status(one))) == set(digests(status(other)))
    succeed(other.post("/inflight/rollback", {}))
    expect_served(other, 2)
    for output in expect_all_go_on(running):
        assert versions_of(output)[:3] == ["v0", "v1", "v2"]

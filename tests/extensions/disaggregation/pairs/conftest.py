"""Fixtures of a real disaggregated pair, with KV sent from one server to the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.load import pause, resume, update
from tests.support.pair import Pair, serve_pair, why_no_pair


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if why_not := why_no_pair():
        for item in items:
            if "pair" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason=why_not))


# this pair's decode server also keeps prefixes
OVERLAP = pytest.param(((), ("--disaggregation-decode-enable-radix-cache",)), id="overlap")
NORMAL = pytest.param((("--disable-overlap-schedule",), ()), id="normal")


@pytest.fixture(scope="module", params=[OVERLAP, NORMAL])
def a_pair(
    request: pytest.FixtureRequest, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    of_both, of_decode = request.param
    flags = ("--weight-version", "v0", "--enable-metrics", *of_both)
    folder = tmp_path_factory.mktemp("pair")
    with serve_pair(checkpoints / "v0", *flags, folder=folder, of_decode=of_decode) as pair:
        yield pair


@pytest.fixture
def pair(a_pair: Pair, checkpoints: Path) -> Pair:
    for server in a_pair.servers:
        # a failed test's requests would delay the update
        pause(server, "abort")
        update(server, checkpoints, 0)
    for server in a_pair.servers:
        resume(server)
    return a_pair

"""A product of two weights that a forward makes and keeps is the served version's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import marker
from harness.server import Server, serve
from tests.support.load import (
    ENDLESS,
    ask,
    expect_all_go_on,
    more_tokens,
    start_running,
    status,
    versions_of,
)
from tests.support.plugins import with_plugin
from tests.support.updates import expect_served, succeed, tensor_body

CONFIG = {**marker.CONFIG, "architectures": ["LazyProductForCausalLM"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lazy_product")
    for version in range(2):
        marker.write(made / f"v{version}", marker.tensors(version), CONFIG)
    return made


@pytest.fixture(scope="module", params=["auto", "off"])
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    env = with_plugin("lazy_product") | {"SGLANG_INFLIGHT_STAGING": request.param}
    flags = ("--weight-version", "v0")
    with serve(folder / "v0", *flags, log=folder / f"log-{request.param}", env=env) as server:
        yield server


def test_update_and_rollback_remake_the_product(server: Server, folder: Path) -> None:
    described = status(server)
    assert described["staging"]["refusal"] is None
    can_roll_back = described["staging"]["mode"] != "off"
    expect_served(server, 0)
    running = start_running(server, 2, tokens=ENDLESS)
    in_flight: dict[str, Any] = {"non_blocking": True, "kv_cache": "keep"}
    disk = {"model_path": str(folder / "v1"), "weight_version": "v1", **in_flight}
    succeed(server.post("/update_weights_from_disk", disk))
    more_tokens(running)
    expect_served(server, 1)
    head = {"lm_head.weight": marker.tensors(2)["lm_head.weight"]}
    body = tensor_body(head, weight_version="v2", **in_flight)
    succeed(server.post("/update_weights_from_tensor", body))
    more_tokens(running)
    expect_served(server, 2)
    if can_roll_back:
        ask(server, "POST", "/inflight/rollback", {"kv_cache": "keep"})
        more_tokens(running)
        expect_served(server, 1)
    expected = ["v0", "v1", "v2", "v1"] if can_roll_back else ["v0", "v1", "v2"]
    for output in expect_all_go_on(running):
        assert versions_of(output) == expected

"""Prometheus metrics at ``/metrics``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.server import PLAIN, Server
from tests.support.load import (
    ENDLESS,
    expect_all_go_on,
    pause,
    resume,
    start_running,
)
from tests.support.metrics import read
from tests.support.updates import refuse, succeed

DASHBOARD = Path(__file__).parents[1] / "dashboards" / "grafana.json"


def test_metrics_count_pauses_and_updates(normal_loop_server: Server, checkpoints: Path) -> None:
    server = normal_loop_server
    before = read(server)

    def grown(name: str) -> float:
        return read(server).get(name, 0.0) - before.get(name, 0.0)

    generations = start_running(server, 2, tokens=ENDLESS)
    pause(server, "retract")
    assert read(server)["paused"] == 1
    assert (grown("pause_grant_seconds_count"), grown("retracted_requests_total")) == (1, 2)
    assert grown("recomputed_tokens_total") >= 2 * 16
    resume(server)
    assert read(server)["paused"] == 0
    assert grown("paused_seconds_total") > 0

    live = {"non_blocking": True, "flush_cache": False}
    update = {"model_path": str(checkpoints / "v1"), "weight_version": "v1", **live}
    receipt = succeed(server.post("/update_weights_from_disk", update))
    assert grown("updates_total:committed") == grown("commit_stall_seconds_count") == 1
    assert grown("staged_bytes_total") == receipt["bytes"]
    assert grown("staged_seconds_total") > 0
    staged_as = receipt["staged_as"]
    assert grown("changed_elements_total") == staged_as["changed_elements"] > 0
    assert read(server)["changed_fraction"] == pytest.approx(staged_as["changed_fraction"])
    assert read(server)["staging_peak_bytes"] == staged_as["staging_bytes_peak"]
    assert read(server)["epoch"] == receipt["epoch"]
    assert load_seconds(server)["disk"] > 0

    succeed(server.post("/inflight/rollback", {}))
    assert grown("updates_total:rolled_back") == 1

    refuse(server.post("/update_weights_from_disk", {"model_path": "/no/such/folder", **live}))
    assert (grown("updates_total:committed"), grown("updates_total:dropped")) == (1, 1)
    expect_all_go_on(generations)
    # the update and the rollback, for each request
    assert (grown("version_lag_count"), grown("version_lag_sum")) == (2, 2 * 2)


def load_seconds(server: Server) -> dict[str, float]:
    """Return SGLang's own metric of updates, by source."""
    text = httpx.get(f"{server.url}/metrics/", timeout=60, **PLAIN).text
    return {
        sample.labels["source"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "sglang:weight_load_duration_seconds"
    }


def test_dashboard_draws_exactly_the_exposed_metrics(
    normal_loop_server: Server, checkpoints: Path
) -> None:
    server = normal_loop_server
    # a metric with labels is exposed once it has a value
    pause(server, "in_place")
    resume(server)
    update = {"model_path": str(checkpoints / "v1"), "non_blocking": True}
    succeed(server.post("/update_weights_from_disk", update))

    text = httpx.get(f"{server.url}/metrics/", timeout=60, **PLAIN).text
    exposed = {
        family.name: {sample.name for sample in family.samples}
        for family in text_string_to_metric_families(text)
        if family.name.startswith("sglang:inflight_")
    }
    drawn = {
        name
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel["targets"]
        for name in re.findall(r"sglang:inflight_\w+", target["expr"])
    }
    assert [family for family, names in exposed.items() if not names & drawn] == []
    assert drawn - set().union(*exposed.values()) == set()


def test_dashboard_has_unique_ids_and_defined_variables() -> None:
    board: dict[str, Any] = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"])))
    assert {name for name in used if not name.startswith("__")} == variables

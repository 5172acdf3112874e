"""A fleet updates a prefill server and a decode server as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_inflight.client import Fleet, FleetRefused, FleetSplit
from sglang_inflight.vocabulary.errors import Conflict
from tests.support.load import (
    prompt,
    status,
)
from tests.support.pair import Pair, expect_labels, versions_by_tokens
from tests.support.proxy import Proxy

END = "/end_weight_update"


@dataclass
class Proxies:
    """Proxies between a fleet and a pair. The fleet lists the decode server first."""

    prefill: Proxy
    decode: Proxy
    fleet: Fleet


@pytest.fixture
def proxies(pair: Pair) -> Iterator[Proxies]:
    with (
        Proxy(pair.prefill).serving() as prefill,
        Proxy(pair.decode).serving() as decode,
        Fleet([decode.url, prefill.url], timeout_s=20) as fleet,
    ):
        yield Proxies(prefill, decode, fleet)


def test_fleet_commits_the_prefill_server_first(
    pair: Pair, proxies: Proxies, checkpoints: Path
) -> None:
    roles = {url: said.role for url, said in proxies.fleet.status().answers.items()}
    assert roles == {proxies.prefill.url: "prefill", proxies.decode.url: "decode"}
    served: list[str] = []
    # at the decode server's commit, the prefill server has committed
    proxies.decode.before(END, lambda: served.append(status(pair.prefill)["weight_version"]))
    running = pair.generate(tokens=2000, input_ids=prompt(40))
    running.wait_for_tokens(3)
    report = proxies.fleet.update_from_disk(str(checkpoints / "v1"), weight_version="v1")
    assert [receipt["weight_version"] for receipt in report.answers.values()] == ["v1", "v1"]
    assert served == ["v1"]
    running.wait_for_tokens(running.count + 3)
    running.abort()
    expect_labels(running.output(), prompt_by=["v0"] * 40)
    output = pair.generate(tokens=8, input_ids=prompt(40)).output()
    assert versions_by_tokens(output) == ["v1"] * 8
    expect_labels(output, prompt_by=["v1"] * 40)


def test_failed_seal_of_the_prefill_server_changes_no_server(
    pair: Pair, proxies: Proxies, checkpoints: Path
) -> None:
    proxies.prefill.before(
        "/seal_weight_update", lambda: pair.prefill.post("/abort_weight_update", {})
    )
    with pytest.raises(FleetRefused):
        proxies.fleet.update_from_disk(str(checkpoints / "v1"), weight_version="v1")
    output = pair.generate(tokens=8, input_ids=prompt(40)).output()
    assert versions_by_tokens(output) == ["v0"] * 8
    assert status(pair.decode)["staging"]["state"] == "empty"


# ---- the last one, because it ends the prefill server ----------------------------------------


def test_prefill_server_dying_at_its_commit_leaves_the_decode_server_unchanged(
    pair: Pair, proxies: Proxies, checkpoints: Path
) -> None:
    running = pair.generate(tokens=400, input_ids=prompt(40))
    running.wait_for_tokens(3)

    def die() -> None:
        pair.prefill.process.kill()
        pair.prefill.process.wait()

    proxies.prefill.before(END, die)
    with pytest.raises(FleetSplit, match="was not asked to") as split:
        proxies.fleet.update_from_disk(str(checkpoints / "v1"), weight_version="v1")
    report = split.value.report
    assert (report.phase, report.answers) == ("commit", {})
    assert report.uncertain == [proxies.prefill.url]
    assert isinstance(report.failures[proxies.decode.url], Conflict)
    # the staged version is dropped, and running requests continue
    assert status(pair.decode)["staging"]["state"] == "empty"
    output = running.output()
    assert versions_by_tokens(output) == ["v0"] * 400
    expect_labels(output, prompt_by=["v0"] * 40)

"""A fleet's version is found, and the servers that are behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sglang_inflight.client import VersionUnclear
from sglang_inflight.client.returning import find_version, make_table, peers_of
from sglang_inflight.vocabulary.answers import (
    Capabilities,
    MemoryStatus,
    RankStatus,
    StagingStatus,
    Status,
)


def serving(
    version: str,
    *digests: str | None,
    epoch: int = 1,
    layout: str = "one",
    hollow: str | None = None,
    running: int = 0,
) -> Status:
    """Return the status of a server with one rank of tensor parallelism for each digest."""
    staging = StagingStatus(
        mode="host", state="empty", update_id=None, tensors=0, bytes=0, can_roll_back=True,
        dirty=None, refusal=None, groups={},
    )  # fmt: skip
    state: dict[str, Any] = {
        "state": "running", "paused": False, "mode": None, "holders": (), "running": running,
        "waiting": 0, "weight_version": version, "epoch": epoch, "previous_version": None,
        "staging": staging, "memory": MemoryStatus(hollow=hollow), "layout": layout,
    }  # fmt: skip
    ranks = tuple(
        RankStatus(**state, digest=digest, dp_rank=0, tp_rank=tp, pp_rank=0)
        for tp, digest in enumerate(digests)
    )
    return Status(**state, digest=digests[0], capabilities=Capabilities(), ranks=ranks)


def fleet(*servers: Status) -> dict[str, Status]:
    return {f"http://{name}": server for name, server in zip("abcdef", servers, strict=False)}


RETURNED = serving("0", None, epoch=0)


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        ([serving("41", "aa"), serving("41", "aa"), RETURNED], "41"),
        # a server without a commit has no vote beside one with a commit
        ([serving("41", "aa"), RETURNED, RETURNED], "41"),
        ([serving("41", "aa"), serving("41", "aa"), serving("40", "bb")], "41"),
        ([RETURNED, RETURNED], "0"),
        # hollow weights are no version
        ([serving("41", "aa"), serving("40", None, hollow="none were sent")], "41"),
        # servers of another layout have other digests
        ([serving("41", "aa"), serving("41", "bb", "cc", layout="two")], "41"),
    ],
)
def test_version_of_more_than_half_is_the_fleets(servers: Sequence[Status], expected: str) -> None:
    assert find_version(fleet(*servers)).weight_version == expected


@pytest.mark.parametrize(
    ("servers", "wanted", "words"),
    [
        ([serving("41", "aa"), serving("40", "bb")], None, "more than half"),
        ([serving("41", "aa"), serving("41", "bb")], None, "different weights"),
        ([serving("41", "aa"), serving("41", "bb")], "41", "different weights"),
        ([serving("41", "aa")], "42", "no server serves '42'"),
        ([serving("41", None, hollow="none were sent")], "41", "no server serves"),
        ([serving("41", None, hollow="none were sent")], None, "more than half"),
    ],
)
def test_unclear_version_is_refused(
    servers: Sequence[Status], wanted: str | None, words: str
) -> None:
    with pytest.raises(VersionUnclear, match=words):
        find_version(fleet(*servers), wanted)


def test_named_version_needs_no_majority() -> None:
    found = fleet(serving("41", "aa"), serving("40", "bb"), serving("40", "bb"))
    version = find_version(found, "41")
    assert [version.is_served_by(server) for server in found.values()] == [True, False, False]


def test_name_with_another_digest_is_behind() -> None:
    found = fleet(
        serving("41", "aa", "ab"),
        serving("41", "aa", "ab"),
        # its second rank serves something else
        serving("41", "aa", "ff"),
        # started on a checkpoint of this name: nothing shows that it is the same
        serving("41", None, None, epoch=0),
        serving("41", None, None, hollow="none were sent"),
        serving("41", "cc", layout="another"),
    )
    version = find_version(found)
    behind = [url for url, server in found.items() if not version.is_served_by(server)]
    assert behind == ["http://c", "http://d", "http://e"]
    assert version.first_digest("one") == "aa"
    assert version.first_digest("another") == "cc"
    assert version.first_digest("third") is None


def test_version_without_a_digest_is_compared_by_its_name() -> None:
    found = fleet(RETURNED, serving("0", None, epoch=0), serving("1", None, epoch=0))
    version = find_version(found)
    assert [version.is_served_by(server) for server in found.values()] == [True, True, False]


def test_idlest_server_of_the_layout_helps() -> None:
    found = fleet(
        serving("41", "aa", running=5),
        serving("41", "aa", running=2),
        serving("41", "bb", layout="another"),
        RETURNED,
    )
    version = find_version(found)
    assert peers_of(found, version, "one") == ["http://b", "http://a"]
    assert peers_of(found, version, "another") == ["http://c"]
    assert peers_of(found, version, "third") == []


def test_table_has_silent_servers_and_an_unclear_version() -> None:
    found = fleet(serving("41", "aa"), serving("40", "bb"))
    urls = [*found, "http://dead"]
    whys = {"http://a": None, "http://b": "it is behind", "http://dead": "refused"}
    table = make_table(urls, found, whys, None)
    assert table.weight_version is None
    assert table.why_unclear is not None
    assert [row.behind for row in table.rows] == [None, None, None]
    assert [row.ready for row in table.rows] == [True, False, False]
    named = make_table(urls, found, whys, "40")
    assert [row.behind for row in named.rows] == [True, False, None]
    assert named.rows[2].weight_version is None
    assert make_table(["http://dead"], {}, whys, None).rows[0].why == "refused"

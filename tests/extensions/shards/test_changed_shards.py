"""A sharded trainer sends what has changed to servers that serve its last version."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from harness import marker
from harness.server import Server
from sglang_inflight.client import shard_sender
from sglang_inflight.client.changes import Change
from tests.extensions.shards.test_sharded_trainers import TENSORS
from tests.extensions.shards.trainer import (
    BY_HAND,
    NORM,
    SWAPPED,
    Failed,
    Tensors,
    make_random,
    ranks_of,
    scatter,
    trainer,
    whole_digests,
)
from tests.support.load import ENDLESS, start_running
from tests.support.updates import LIVE, expect_served, expect_to_run_on, succeed, tensor_body

pytest_plugins = ["tests.support.fixtures"]

FLAVOURS = pytest.mark.parametrize("flavour", ["server", "tp2_server"])
HEAD = "lm_head.weight"


def send_whole(sharded: Any, version: int, layout: str = "rows") -> None:
    assert sharded.send(layout=layout, version=version)[0]["tensors"] == TENSORS


def send_changes(sharded: Any, version: int, layout: str = "rows") -> None:
    """Send a version, and check that nothing but the changes of its head was sent."""
    assert sharded.send(layout=layout, version=version)[0]["tensors"] == 1


@FLAVOURS
@pytest.mark.parametrize(
    "layout", ["rows", "columns", "rows and columns", "replicas of rows", "rows of three", BY_HAND]
)
def test_changes_of_shards_serve_what_whole_tensors_would(
    flavour: str, layout: str, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(flavour)
    generations = start_running(server, 2, tokens=ENDLESS)
    with trainer(server.url, ranks_of(layout), sparse=True) as sharded:
        send_whole(sharded, 1, layout)
        for version in (2, 3):
            for generation in generations:
                generation.wait_for_tokens(generation.count + 3)
            send_changes(sharded, version, layout)
            expect_served(server, version)
        expect_to_run_on(server, generations, [0, 1, 2, 3])
        # none of the elements is as before
        sharded.send(layout=layout, version=4, change=make_random)
        sent = sharded.send(layout=layout, version=4, change=scatter)[0]
        same = sharded.send(layout=layout, version=4, change=scatter)[0]
    assert (same["tensors"], same["digests"]) == (0, sent["digests"])
    scatter(0, tensors := dict(marker.tensors(4)))
    assert sent["digests"] == whole_digests(server, tensors)


def test_update_behind_the_trainers_back_is_replaced_by_a_whole_version(
    tp2_server: Server,
) -> None:
    """The other trainer's version has the same name, and its weights decide."""
    with trainer(tp2_server.url, 2, sparse=True) as sharded:
        send_whole(sharded, 1)
        send_changes(sharded, 2)
        other = marker.tensors(5)
        other[NORM] = other[NORM] * 1.5
        body = tensor_body(other, **LIVE, ranks=2, weight_version="v2")
        succeed(tp2_server.post("/update_weights_from_tensor", body))
        send_whole(sharded, 3)
        send_changes(sharded, 4)
        digests = sharded.send(layout="rows", version=4)[0]["digests"]
    assert digests == whole_digests(tp2_server, dict(marker.tensors(4)))


def test_rollback_is_followed_by_a_whole_version(server: Server) -> None:
    with trainer(server.url, 2, sparse=True) as sharded:
        send_whole(sharded, 1)
        send_changes(sharded, 2)
        succeed(server.post("/inflight/rollback", {}))
        send_whole(sharded, 3)
        send_changes(sharded, 4)
    expect_served(server, 4)


def test_version_in_other_shards_is_sent_whole(tp2_server: Server) -> None:
    """A rank's copy is of other elements then, and may be as large as those that it has now."""
    with trainer(tp2_server.url, 2, sparse=True) as sharded:
        send_whole(sharded, 1, BY_HAND)
        send_whole(sharded, 2, SWAPPED)
        expect_served(tp2_server, 2)
        send_changes(sharded, 3, SWAPPED)
    expect_served(tp2_server, 3)


def pad_head(_: int, tensors: Tensors) -> None:
    """Give a head with rows that no server uses."""
    tensors[HEAD] = torch.cat([tensors[HEAD], torch.ones_like(tensors[HEAD][:8])])


def test_tensor_of_another_shape_is_sent_whole(tp2_server: Server) -> None:
    with trainer(tp2_server.url, 2, sparse=True) as sharded:
        sharded.send(layout=BY_HAND, version=1, change=pad_head)
        sent = sharded.send(layout=BY_HAND, version=2, change=pad_head)[0]
    assert (sent["tensors"], sent["takes_changes"]) == (1, True)
    expect_served(tp2_server, 2)


def nan_on_rank_1(rank: int, tensors: Tensors) -> None:
    if rank == 1:
        tensors[NORM] = torch.full_like(tensors[NORM], torch.nan)


def test_refused_version_is_followed_by_a_whole_one(tp2_server: Server) -> None:
    generations = start_running(tp2_server, 2, tokens=ENDLESS)
    with trainer(tp2_server.url, 2, sparse=True) as sharded:
        send_whole(sharded, 1, BY_HAND)
        with pytest.raises(Failed) as failed:
            sharded.send(layout=BY_HAND, version=2, change=nan_on_rank_1)
        assert all("holds NaN" in why for why in failed.value.by_rank.values()), failed.value
        expect_served(tp2_server, 1)
        send_whole(sharded, 3, BY_HAND)
        send_changes(sharded, 4, BY_HAND)
        expect_served(tp2_server, 4)
    expect_to_run_on(tp2_server, generations, [0, 1, 3, 4])


def cut_wrong(by: Callable[[Change], Change], rank: int) -> None:
    """Have rank 0 cut changes otherwise, once."""
    if rank != 0:
        return
    cut = vars(shard_sender)["cut_changes"]

    def wrong(*args: Any) -> dict[str, Change]:
        vars(shard_sender)["cut_changes"] = cut
        return {name: by(change) for name, change in cut(*args).items()}

    vars(shard_sender)["cut_changes"] = wrong


def to_another_part(change: Change) -> Change:
    """Move changes to rows that another rank uses."""
    return change._replace(indices=change.indices + marker.VOCAB // 2 * marker.HIDDEN)


def beyond_the_tensor(change: Change) -> Change:
    return change._replace(indices=change.indices + marker.VOCAB * marker.HIDDEN)


def twice(change: Change) -> Change:
    indices = change.indices.clone()
    indices[1] = indices[0]
    return change._replace(indices=indices)


@pytest.mark.parametrize(
    ("by", "why"),
    [
        (to_another_part, "lie outside of the part"),
        (beyond_the_tensor, "out of range"),
        (twice, "comes twice"),
    ],
)
def test_refused_changes_are_followed_by_the_whole_version_in_the_same_send(
    tp2_server: Server, by: Callable[[Change], Change], why: str
) -> None:
    with trainer(tp2_server.url, 2, sparse=True) as sharded:
        send_whole(sharded, 1)
        sent = sharded.send(layout="rows", version=2, does=partial(cut_wrong, by))[0]
        assert (sent["tensors"], sent["takes_changes"]) == (TENSORS, False)
        expect_served(tp2_server, 2)
        # until it joins again
        send_whole(sharded, 3)
        assert sharded.send(layout="rows", version=3)[0]["tensors"] == TENSORS
    expect_served(tp2_server, 3)
    assert why in tp2_server.log_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_trainer_killed_amid_changes_leaves_the_server_serving(
    tp2_server: Server, rank: int
) -> None:
    generations = start_running(tp2_server, 2, tokens=ENDLESS)
    with trainer(tp2_server.url, 2, sparse=True) as sharded:
        # the head's rows are changed on rank 0 alone
        sharded.send(layout="columns", version=1)
        sharded.begin(layout="columns", version=2, dies=(rank, 0))
        with pytest.raises(Failed) as failed:
            sharded.end(1)
        assert [*failed.value.by_rank] == [1 - rank]
    expect_served(tp2_server, 1)
    with trainer(tp2_server.url, 2, sparse=True) as other:
        other.send(layout="columns", version=3, on_busy="replace")
        send_changes(other, 4, "columns")
    expect_served(tp2_server, 4)
    expect_to_run_on(tp2_server, generations, [0, 1, 3, 4])


def test_changes_are_written_in_place_without_shadow_weights(tp2_off_server: Server) -> None:
    with trainer(tp2_off_server.url, 2, sparse=True) as sharded:
        send_whole(sharded, 1)
        for version in (2, 3):
            send_changes(sharded, version)
            expect_served(tp2_off_server, version)
        digests = sharded.send(layout="rows", version=3)[0]["digests"]
    assert digests == whole_digests(tp2_off_server, dict(marker.tensors(3)))


def wide_and_noisy(_: int, tensors: Tensors) -> None:
    """Give a trainer's float32 weights, which differ by less than bfloat16 shows."""
    for name, tensor in tensors.items():
        tensors[name] = tensor.float() * 1.0001


def test_changes_are_those_of_what_is_sent(server: Server) -> None:
    with trainer(server.url, 2, sparse=True, dtype=torch.bfloat16) as sharded:
        send_whole(sharded, 1)
        sent = sharded.send(layout="rows", version=2, change=wide_and_noisy)[0]
        assert sent["tensors"] == 1
    expect_served(server, 2)

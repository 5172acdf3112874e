"""Trainers whose weights are sharded, against servers with running requests."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import torch

from harness import marker
from harness.server import PLAIN, Server
from sglang_inflight.client import Client, Sender
from sglang_inflight.client.shard_sender import GROUP_NAME
from sglang_inflight.vocabulary.shards import Shards, read_shards
from tests.extensions.shards.trainer import (
    BY_HAND,
    LAYOUTS,
    Failed,
    Tensors,
    digests_of,
    make_random,
    ranks_of,
    trainer,
)
from tests.support.load import ENDLESS, start_running
from tests.support.updates import expect_served, expect_to_run_on

pytest_plugins = ["tests.support.fixtures"]

ALL = [*LAYOUTS, BY_HAND]
TENSORS = len(dict(marker.tensors(0)))


@pytest.mark.parametrize("flavour", ["tp2_server", "dp2_server"])
def test_sharded_trainer_changes_no_token_before_the_version_is_whole(
    flavour: str, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(flavour)
    generations = start_running(server, 2, tokens=ENDLESS)
    with trainer(server.url, 2) as sharded:
        for version in (1, 2):
            for generation in generations:
                generation.wait_for_tokens(generation.count + 3)
            answers = sharded.send(layout="rows", version=version)
            assert answers[0]["tensors"] == TENSORS
            expect_served(server, version)
    expect_to_run_on(server, generations, [0, 1, 2])


@pytest.mark.parametrize("ranks", sorted({ranks_of(layout) for layout in ALL}))
@pytest.mark.parametrize("flavour", ["server", "tp2_server"])
def test_shards_serve_what_whole_tensors_would(
    flavour: str, ranks: int, request: pytest.FixtureRequest
) -> None:
    """The layouts follow each other, so that one process group serves several."""
    server: Server = request.getfixturevalue(flavour)
    tensors = dict(marker.tensors(1))
    make_random(0, tensors)
    with Client(server.url) as client, Sender(client) as sender:
        expected = digests_of(sender.send(tensors.items(), weight_version="whole"))
        with trainer(server.url, ranks) as sharded:
            for layout in (each for each in ALL if ranks_of(each) == ranks):
                sharded.send(layout=layout, version=2)
                expect_served(server, 2)
                sent = sharded.send(layout=layout, version=1, change=make_random)[0]
                assert sent["digests"] == expected, layout


def shards_of(rank: dict[str, Any]) -> Shards:
    return Shards(rank["digest"], base64.b64decode(rank["lines"]))


def test_group_that_is_not_formed_is_an_error_on_every_rank(server: Server) -> None:
    with (
        Client(server.url) as client,
        Sender(client, group_name=GROUP_NAME) as taken,
        trainer(server.url, 2) as sharded,
    ):
        with pytest.raises(Failed) as failed:
            sharded.send(layout="rows", version=1)
        assert sorted(failed.value.by_rank) == [0, 1]
        assert all("is taken" in why for why in failed.value.by_rank.values()), failed.value
        taken.leave()
        sharded.send(layout="rows", version=1)
    expect_served(server, 1)


def test_rank_says_what_it_uses(tp2_server: Server) -> None:
    with trainer(tp2_server.url, 1) as sharded:
        sharded.send(layout="one", version=1)
    ranks = plan_of(tp2_server)
    assert [(rank["rank"], rank["tp_rank"]) for rank in ranks] == [(0, 0), (1, 1)]
    uses = [read_shards(shards_of(rank)) for rank in ranks]
    whole = marker.tensors(0)
    for name, tensor in whole.items():
        # each rank uses a part, and both together all, or each uses all
        regions = [found[name].regions[0] for found in uses]
        assert all(found[name].shape == tensor.shape for found in uses)
        counts = torch.zeros(tensor.shape)
        for region in regions:
            counts[region.slices()] += 1
        assert counts.min() == counts.max() == (2 if regions[0] == regions[1] else 1), name
    parts = [sum(held.regions[0].numel for held in found.values()) for found in uses]
    assert max(parts) < 0.75 * sum(tensor.numel() for tensor in whole.values())
    again = plan_of(tp2_server, known=[ranks[0]["digest"]])
    assert [rank["lines"] is None for rank in again] == [True, False]


def plan_of(server: Server, known: Sequence[str] = ()) -> list[dict[str, Any]]:
    answer = httpx.get(f"{server.url}/inflight/plan", params=[("known", d) for d in known], **PLAIN)
    ranks: list[dict[str, Any]] = answer.raise_for_status().json()["ranks"]
    return ranks


def nan_on_rank_1(rank: int, tensors: Tensors) -> None:
    if rank == 1:
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * torch.nan


def other_dtype_on_rank_1(rank: int, tensors: Tensors) -> None:
    if rank == 1:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].double()


def none_on_rank_1(rank: int, tensors: Tensors) -> None:
    if rank == 1:
        del tensors["model.norm.weight"]


def none_on_any_rank(rank: int, tensors: Tensors) -> None:
    del tensors["model.norm.weight"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (nan_on_rank_1, "'model.norm.weight' holds NaN"),
        (other_dtype_on_rank_1, "rank 1 of the trainer has 'model.norm.weight' as float64"),
        (none_on_rank_1, "of 'model.norm.weight' no rank has the elements"),
        (none_on_any_rank, "model.norm.weight"),
    ],
)
def test_wrong_shards_are_refused_on_every_rank_and_the_next_ones_are_taken(
    tp2_server: Server, change: Any, why: str
) -> None:
    generations = start_running(tp2_server, 2, tokens=ENDLESS)
    with trainer(tp2_server.url, 2) as sharded:
        with pytest.raises(Failed) as failed:
            sharded.send(layout=BY_HAND, version=1, change=change)
        assert sorted(failed.value.by_rank) == [0, 1]
        assert all(why in each for each in failed.value.by_rank.values()), failed.value
        expect_served(tp2_server, 0)
        sharded.send(layout=BY_HAND, version=1)
        expect_served(tp2_server, 1)
    expect_to_run_on(tp2_server, generations, [0, 1])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("buckets", [0, 2])
def test_killed_trainer_leaves_the_server_serving(
    tp2_server: Server, rank: int, buckets: int
) -> None:
    generations = start_running(tp2_server, 2, tokens=ENDLESS)
    with trainer(tp2_server.url, 2) as sharded:
        sharded.begin(layout="rows", version=1, dies=(rank, buckets))
        with pytest.raises(Failed) as failed:
            sharded.end(1)
        assert [*failed.value.by_rank] == [1 - rank]
    expect_served(tp2_server, 0)
    with trainer(tp2_server.url, 2) as other:
        # rank 0 may have left a session, until its lease ends
        other.send(layout="rows", version=1, on_busy="replace")
    expect_served(tp2_server, 1)
    expect_to_run_on(tp2_server, generations, [0, 1])


def test_floats_are_cast_on_the_senders_side(tp2_server: Server) -> None:
    """A trainer with float32 weights sends half of their bytes."""
    with trainer(tp2_server.url, 2) as sharded:
        expected = sharded.send(layout="rows", version=1)[0]
    with trainer(tp2_server.url, 2, dtype=torch.bfloat16) as sharded:
        sent = sharded.send(layout="rows", version=1, change=make_wide)[0]
    assert sent["digests"] == expected["digests"]
    assert sent["bytes"] == expected["bytes"]
    expect_served(tp2_server, 1)


def make_wide(rank: int, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.float()

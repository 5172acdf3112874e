"""Sharded trainers and servers of each kind of model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest

from harness import marker
from harness.server import Server, serve
from sglang_inflight.client import Client, Sender
from sglang_inflight.vocabulary.shards import read_shards
from tests.extensions.shards.test_sharded_trainers import plan_of, shards_of
from tests.extensions.shards.trainer import (
    BY_HAND,
    MODELS,
    digests_of,
    make_random,
    scatter,
    trainer,
    whole_digests,
)
from tests.support import block_fp8, mla, moe
from tests.support.plugins import with_plugin


class Served(NamedTuple):
    """A model, and what its server needs. ``share``: most of the elements that one rank uses."""

    model: str
    config: dict[str, Any]
    flags: Sequence[str]
    env: dict[str, str]
    share: float


# SGLang's own experts need a GPU
EXPERTS = with_plugin("experts")
TP = ("--tp-size", "2")
SERVED = {
    "stages": Served("stages", marker.TWO_LAYERS, ("--pp-size", "2"), {}, 0.8),
    "experts cut in two": Served("moe", moe.CONFIG, TP, EXPERTS, 0.8),
    "experts of two ranks": Served("moe", moe.CONFIG, (*TP, "--ep-size", "2"), EXPERTS, 0.8),
    # finished after loading: derived weights, and blocks of FP8 with their scales
    "latent attention": Served("mla", mla.CONFIG, TP, mla.ENV, 0.9),
    "blocks of FP8": Served("fp8", block_fp8.CONFIG, TP, block_fp8.ENV, 0.8),
    "blocks of FP8 on one rank": Served("fp8", block_fp8.CONFIG, (), block_fp8.ENV, 1.0),
}


@pytest.fixture(scope="module", params=[*SERVED.values()], ids=[*SERVED])
def kind(request: pytest.FixtureRequest) -> Served:
    found: Served = request.param
    return found


@pytest.fixture(scope="module")
def kinds_server(kind: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("kind")
    marker.write(folder / "v0", MODELS[kind.model](0), kind.config)
    with serve(folder / "v0", *kind.flags, log=folder / "log", env=kind.env) as server:
        yield server


def test_changes_reach_each_kind_of_model(kind: Served, kinds_server: Server) -> None:
    """A tensor that a rank takes whole alone follows in the same session."""
    changed = dict(MODELS[kind.model](1))
    scatter(0, changed)
    with trainer(kinds_server.url, 2, sparse=True) as sharded:
        order = partial(sharded.send, layout=BY_HAND, version=1, model=kind.model)
        sent = []
        # the second time tensors that go whole alone are known
        for _ in range(2):
            order(change=make_random)
            sent.append(order(change=scatter)[0])
    assert all(each["takes_changes"] for each in sent)
    assert [each["digests"] for each in sent] == [whole_digests(kinds_server, changed)] * 2


def test_each_rank_gets_its_part_of_the_model(kind: Served, kinds_server: Server) -> None:
    make = MODELS[kind.model]
    tensors = dict(make(1))
    make_random(0, tensors)
    with Client(kinds_server.url) as client, Sender(client) as sender:
        expected = digests_of(sender.send(tensors.items(), weight_version="whole"))
        sender.send(make(2).items(), weight_version="another")
    with trainer(kinds_server.url, 2) as sharded:
        # gloo spreads no FP8 tensor over a mesh
        sent = sharded.send(layout=BY_HAND, version=1, change=make_random, model=kind.model)
    assert sent[0]["digests"] == expected
    uses = [
        sum(held.regions[0].numel for held in read_shards(shards_of(rank)).values())
        for rank in plan_of(kinds_server)
    ]
    assert max(uses) <= kind.share * sum(tensor.numel() for tensor in tensors.values())

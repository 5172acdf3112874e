"""A rank takes what its namesake offers, or nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from sglang_inflight.extensions.saves import loading
from sglang_inflight.extensions.saves.stream import FORMAT, Connection, Described, Head, Kind
from sglang_inflight.messages import PeerSource
from sglang_inflight.scheduler.update.jobs import WHOLE_LOADERS
from sglang_inflight.scheduler.update.mode import StagingMode
from sglang_inflight.scheduler.update.update import Update
from sglang_inflight.tensor_digest import Digest, HostReader, TensorDigest
from sglang_inflight.vocabulary.answers import RankOffered
from sglang_inflight.vocabulary.errors import Conflict, Dropped, Refused
from tests.support.rank import Rank

TOKEN = "a" * 64
EVERY_MODE = pytest.mark.parametrize(
    "mode", [StagingMode.DEVICE, StagingMode.CHANGES, StagingMode.OFF]
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(3), requires_grad=False)


TENSORS = {"target.weight": torch.arange(8.0).view(4, 2), "target.bias": torch.ones(3)}


@pytest.fixture(autouse=True)
def only_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    WHOLE_LOADERS.compose([loading.__name__])
    monkeypatch.setattr(loading, "get_parallel", lambda: SimpleNamespace(pp_rank=0, tp_rank=0))
    with torch.no_grad():
        yield
    WHOLE_LOADERS.compose([])


@dataclass
class Sending:
    """Describes what one connection of a peer sends."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=lambda: dict(TENSORS))
    # shapes in the head, where it lies
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    whole: str | None = None
    offer_id: str = "o"
    weight_version: str = "v1"
    layout: Mapping[str, str] = field(default_factory=dict)
    # tensors after which it closes the connection
    most: int | None = None
    twice: bool = False

    def send(self, connection: Connection) -> None:
        described = [
            Described(name, str(t.dtype), self.shapes.get(name, tuple(t.shape)))
            for name, t in self.tensors.items()
        ]
        head = Head(
            FORMAT,
            self.offer_id,
            self.weight_version,
            {**self.layout},
            described * (2 if self.twice else 1),
            {},
        )
        connection.send(Kind.HEAD, msgspec.json.encode(head))
        digest, reader = Digest(), HostReader()
        for at, (name, tensor) in enumerate(self.tensors.items()):
            if at == self.most:
                return
            one = TensorDigest(name, tensor)
            for piece in one.read(reader):
                connection.send(Kind.PIECE, piece.view(torch.uint8).numpy().tobytes())
            connection.send(Kind.DIGEST, self.digests.get(name, one.hexdigest()).encode())
            digest.add(one.line)
        connection.send(Kind.END, (self.whole or digest.hexdigest()).encode())


def begin(rank: Rank) -> Update:
    opened: Any = SimpleNamespace(
        update_id="u", partial=False, may_be_empty=False, in_place=False, asks_digests=False
    )
    update = Update(opened, base_version="")
    rank._jobs.prepare(update, "all", after=None)
    return update


def load(rank: Rank, sendings: Sequence[Sending], *, digest: str | None = None) -> str:
    """Load from a peer whose connections send ``sendings``. Return the version's name."""
    update = begin(rank)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for sending in sendings:
                raw, _ = server.accept()
                assert raw.recv(64, socket.MSG_WAITALL) == TOKEN.encode()
                connection = Connection(raw)
                # a receiver that refuses has left
                with suppress(OSError):
                    sending.send(connection)
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        host, port = server.getsockname()
        offered = RankOffered(tp_rank=0, pp_rank=0, host=host, port=port, digest=digest)
        source = PeerSource(offer_id="o", token=TOKEN, ranks=[offered])
        staged = rank._jobs.fill(update, source, None)
        thread.join(60)
    rank._jobs.seal(update, None)
    assert update.sealed is not None
    update.sealed.swap.make()
    assert staged.saved is not None
    return staged.saved.weight_version


def times_for(mode: StagingMode) -> int:
    """Return how often a rank reads: weights written in place are proved first."""
    return 2 if mode is StagingMode.OFF else 1


@EVERY_MODE
def test_offered_weights_are_taken(mode: StagingMode) -> None:
    model = Model()
    rank = Rank(mode, model, checkpoint_shapes={})
    assert load(rank, [Sending()] * times_for(mode)) == "v1"
    assert torch.equal(model.weight, TENSORS["target.weight"])
    assert torch.equal(model.bias, TENSORS["target.bias"])


LIES: dict[str, tuple[Sending, type[Exception], str]] = {
    "tensor's digest": (Sending(digests={"target.bias": "0" * 16}), Refused, "'target.bias' has"),
    "digest": (Sending(whole="0" * 16), Refused, "0" * 16),
    "offer": (Sending(offer_id="other"), Refused, "another offer"),
    "layout": (Sending(layout={"dtype": "x"}), Refused, "another layout: dtype is 'x' there"),
    "shape": (Sending(shapes={"target.bias": (1 << 40,)}), Refused, "'target.bias' is torch.float"),
    "missing": (Sending({"target.bias": torch.ones(3)}), Refused, "'target.weight' is missing"),
    "surplus": (Sending(TENSORS | {"odd": torch.ones(1)}), Refused, "'odd' is no weight"),
    "twice": (Sending(twice=True), Refused, "twice"),
    "cut": (Sending(most=1), Conflict, "pp0-tp0 .* closed"),
    "nan": (Sending(TENSORS | {"target.bias": torch.full((3,), torch.nan)}), Refused, "NaN"),
}


@EVERY_MODE
@pytest.mark.parametrize("lie", LIES)
def test_what_is_not_as_offered_changes_nothing(mode: StagingMode, lie: str) -> None:
    sending, error, words = LIES[lie]
    model = Model()
    rank = Rank(mode, model, checkpoint_shapes={})
    with pytest.raises(error, match=words):
        load(rank, [sending])
    assert not model.weight.any()
    assert not model.bias.any()


def test_digest_of_another_version_than_offered_is_refused() -> None:
    model = Model()
    rank = Rank(StagingMode.OFF, model, checkpoint_shapes={})
    with pytest.raises(Conflict, match="offered 0000"):
        load(rank, [Sending()], digest="0" * 16)
    assert not model.weight.any()


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (Sending(TENSORS | {"target.weight": torch.ones(4, 2)}), "two digests"),
        (Sending(weight_version="v2"), "something else than before"),
    ],
)
def test_second_reading_writes_only_what_the_first_has_proved(second: Sending, words: str) -> None:
    model = Model()
    rank = Rank(StagingMode.OFF, model, checkpoint_shapes={})
    with pytest.raises(Conflict, match=words):
        load(rank, [Sending(), second])
    assert not model.weight.any()


def test_rank_without_a_namesake_is_refused() -> None:
    rank = Rank(StagingMode.DEVICE, Model(), checkpoint_shapes={})
    update = begin(rank)
    offered = RankOffered(tp_rank=1, pp_rank=0, host="127.0.0.1", port=1)
    with pytest.raises(Refused, match="other ranks: pp0-tp1, and this one is pp0-tp0"):
        rank._jobs.fill(update, PeerSource(offer_id="o", token=TOKEN, ranks=[offered]), None)


def test_dropped_update_leaves_a_silent_peer() -> None:
    rank = Rank(StagingMode.DEVICE, Model(), checkpoint_shapes={})
    update = begin(rank)
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        source = PeerSource(
            offer_id="o",
            token=TOKEN,
            ranks=[RankOffered(tp_rank=0, pp_rank=0, host=host, port=port)],
        )

        kept: list[socket.socket] = []

        def drop() -> None:
            raw, _ = server.accept()
            kept.append(raw)
            assert raw.recv(64, socket.MSG_WAITALL) == TOKEN.encode()
            update.dropped = "its caller has left"

        threading.Thread(target=drop, daemon=True).start()
        with pytest.raises(Dropped, match="its caller has left"):
            rank._jobs.fill(update, source, None)
    kept[0].close()

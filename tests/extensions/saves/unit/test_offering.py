"""Offers of one rank take turns, and a transfer that fails ends alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_inflight.extensions.saves import offering, stream
from sglang_inflight.extensions.saves.messages import Listens, OfferCall, WithdrawCall
from sglang_inflight.extensions.saves.offering import Offering
from sglang_inflight.extensions.saves.stream import Connection, Kind
from sglang_inflight.extensions.saves.tensors import LiveNumbers
from sglang_inflight.tensor_digest import digest
from sglang_inflight.vocabulary.errors import Conflict, Dropped

TOKEN = "a" * 64
WEIGHT = torch.arange(6.0)


class Served:
    """Weights of one version, on the host."""

    def __init__(self) -> None:
        self.live = SimpleNamespace(weights=0, digest=None, why_not_served=None)
        self.read: Callable[[], None] = lambda: None

    def require(self, expected_version: str | None, *, current_version: str) -> None:
        assert expected_version is None

    def await_no_reader(self) -> None:
        """Nobody reads: the jobs run on the test's thread."""

    def tensors(self, check: Callable[[], None]) -> list[tuple[str, torch.Tensor]]:
        check()
        return [("target.w", WEIGHT)]

    def pieces_of(
        self, tensor: torch.Tensor, weights: int, check: Callable[[], None]
    ) -> Iterator[torch.Tensor]:
        check()
        self.read()
        yield from tensor.split(4)

    def numbers(self, weights: int, check: Callable[[], None]) -> LiveNumbers:
        return LiveNumbers({}, ())


class Answers:
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def succeed(self, call: Any, answer: Any) -> None:
        self.found[call.call_id] = answer

    def fail(self, call: Any, error: BaseException) -> None:
        self.found[call.call_id] = error


class Rank:
    """The offers of a rank. ``turn`` does what the offering thread would do next."""

    def __init__(self) -> None:
        self.served, self.answers = Served(), Answers()
        self.jobs: list[Callable[[], None]] = []
        worker: Any = SimpleNamespace(do=self.jobs.append)
        served: Any = self.served
        answers: Any = self.answers
        self.offering = Offering(served, answers, {}, lambda: worker)

    def offer(self, name: str, *, timeout_s: float = 600.0) -> None:
        call = OfferCall(offer_id=name, token=TOKEN, host="127.0.0.1", timeout_s=timeout_s)
        call.call_id = name
        self.offering.offer(call, current_version="v1")

    def withdraw(self, name: str) -> None:
        call = WithdrawCall(offer_id=name)
        call.call_id = f"end of {name}"
        self.offering.withdraw(call)

    def turn(self) -> None:
        jobs = self.jobs[:]
        self.jobs.clear()
        for job in jobs:
            job()

    def answered(self) -> set[str]:
        return self.answers.found.keys() & {"a", "b", "c"}

    def receive(self, name: str) -> list[Any]:
        """Receive by offer ``name``, while the turns go on. Return what came, or its error."""
        at: Listens = self.answers.found[name]
        found: list[Any] = []

        def receive() -> None:
            assert at.host is not None
            connection = Connection.to(at.host, at.port, TOKEN)
            try:
                head = connection.receive_head()
                whole = torch.empty(WEIGHT.shape)
                content = whole.view(torch.uint8).numpy().data
                connection.receive_into(content, lambda _: None)
                one = connection.receive_digest(Kind.DIGEST)
                found.append((head.weight_version, whole, one, connection.receive_digest(Kind.END)))
            except (Conflict, OSError) as error:
                found.append(error)
            connection.close()

        receiving = threading.Thread(target=receive, daemon=True)
        receiving.start()
        while receiving.is_alive():
            self.turn()
        return found


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(offering, "own_replica", lambda: 0)
    monkeypatch.setattr(offering, "_TURN_S", 0.01)
    rank = Rank()
    yield rank
    rank.offering.stop("the test has ended")
    while rank.jobs:
        rank.turn()


def settle(rank: Rank) -> None:
    """Do the turns that are due without a receiver."""
    for _ in range(4):
        rank.turn()


def test_receivers_of_one_offer_get_the_same(rank: Rank) -> None:
    rank.offer("a")
    settle(rank)
    for _ in range(2):
        ((version, whole, one, _),) = rank.receive("a")
        assert (version, one) == ("v1", digest(WEIGHT, "target.w"))
        assert torch.equal(whole, WEIGHT)


def test_receiver_that_waits_for_another_is_told(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer may take longer than a receiver's patience with a silent peer."""
    monkeypatch.setattr(stream, "_TEND_S", 0.0)
    rank.offer("a")
    settle(rank)
    at: Listens = rank.answers.found["a"]
    assert at.host is not None
    seconds: list[Connection] = []
    told: list[bytes] = []
    (listening,) = [rank.offering._listening]
    assert listening is not None

    def second_comes() -> None:
        assert at.host is not None
        seconds.append(Connection.to(at.host, at.port, TOKEN))
        raw = seconds[0]._socket
        raw.settimeout(0.01)
        while not told:
            listening.check()
            with suppress(TimeoutError):
                told.append(raw.recv(9))
        rank.served.read = lambda: None

    rank.served.read = second_comes
    assert isinstance(rank.receive("a")[0], tuple)
    assert told == [bytes([Kind.WAIT]) + bytes(8)]
    # then it is its turn
    (second,) = seconds
    second._socket.settimeout(60)
    rank.turn()
    assert second.receive_head().offer_id == "a"
    second.close()


def test_receiver_that_leaves_while_it_waits_is_forgotten(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_TEND_S", 0.0)
    rank.offer("a")
    settle(rank)
    listening = rank.offering._listening
    assert listening is not None
    Connection.to(listening.listener.host, listening.listener.port, TOKEN).close()
    while not listening.listener._waiting:
        listening.check()
    while listening.listener._waiting:
        listening.check()
    assert isinstance(rank.receive("a")[0], tuple)


def test_offers_take_turns(rank: Rank) -> None:
    for name in ("a", "b", "c"):
        rank.offer(name)
    settle(rank)
    assert rank.answered() == {"a"}
    rank.withdraw("b")
    settle(rank)
    assert rank.answered() == {"a", "b"}
    assert isinstance(rank.answers.found["b"], Conflict)
    rank.withdraw("a")
    settle(rank)
    assert rank.answered() == {"a", "b", "c"}
    assert len(rank.receive("c")) == 1
    rank.withdraw("c")
    settle(rank)
    # nobody looks for receivers any more, until an offer comes
    assert not rank.jobs
    rank.answers.found.clear()
    rank.offer("a")
    settle(rank)
    assert isinstance(rank.answers.found["a"], Listens)


def test_offer_without_a_receiver_makes_way(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.offer("a")
    settle(rank)
    monkeypatch.setattr(offering, "_IDLE_S", -1.0)
    settle(rank)
    # there is nothing to make way for
    assert isinstance(rank.receive("a")[0], tuple)
    rank.offer("b")
    settle(rank)
    assert rank.answered() == {"a", "b"}
    assert isinstance(rank.receive("b")[0], tuple)


def test_offer_whose_time_runs_out_before_its_turn_is_answered(rank: Rank) -> None:
    rank.offer("a")
    settle(rank)
    rank.offer("b", timeout_s=-1.0)
    settle(rank)
    assert isinstance(rank.answers.found["b"], Dropped)
    assert isinstance(rank.receive("a")[0], tuple)


def test_offer_of_a_version_that_has_moved_on_is_refused(rank: Rank) -> None:
    rank.offer("a")
    rank.served.live.weights = 1
    settle(rank)
    assert "moved on" in str(rank.answers.found["a"])


def test_digest_other_than_offered_is_not_sent(rank: Rank) -> None:
    rank.served.live.digest = "0" * 16
    rank.offer("a")
    settle(rank)
    (error,) = rank.receive("a")
    assert "and 0000000000000000 was offered" in str(error)


def test_failed_transfer_ends_alone(rank: Rank) -> None:
    def fail() -> None:
        raise Conflict("the version has moved on")

    rank.offer("a")
    settle(rank)
    rank.served.read = fail
    (error,) = rank.receive("a")
    assert isinstance(error, Conflict)
    assert "moved on" in str(error)
    rank.served.read = lambda: None
    assert isinstance(rank.receive("a")[0], tuple)


def test_fault_of_the_rank_ends_no_later_transfer(rank: Rank) -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    rank.offer("a")
    settle(rank)
    rank.served.read = fail
    with pytest.raises(RuntimeError, match="no memory"):
        rank.receive("a")
    rank.served.read = lambda: None
    assert isinstance(rank.receive("a")[0], tuple)


def test_stop_gives_up_all_offers(rank: Rank) -> None:
    rank.offer("a")
    rank.offer("b")
    settle(rank)
    rank.offering.stop("the weights are released")
    settle(rank)
    assert "released" in str(rank.answers.found["b"])
    assert not rank.jobs


def test_offers_are_limited(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offering, "_MOST_OFFERS", 2)
    rank.offer("a")
    rank.offer("b")
    with pytest.raises(Conflict, match="2 offers"):
        rank.offer("c")
    rank.withdraw("a")
    settle(rank)
    rank.offer("c")


def test_further_replica_sends_nothing(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offering, "own_replica", lambda: 1)
    rank.offer("a")
    answer: Listens = rank.answers.found["a"]
    assert (answer.weight_version, answer.host) == ("v1", None)
    assert not rank.jobs

"""Digests of arriving tensors, and what a call does with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from sglang_inflight.client import digest_of_all, digests
from sglang_inflight.messages import AskedDigests, CommitCall, Failed, OpenCall, RankAnswer
from sglang_inflight.scheduler.update.checks.arrivals import Arrivals
from sglang_inflight.scheduler.update.rate import UNPACED
from sglang_inflight.scheduler.update.sources.batches import Weights
from sglang_inflight.tensor_digest import CHUNK_BYTES, HostReader
from sglang_inflight.vocabulary.errors import Altered, Dropped, Refused, Unproven
from tests.support.ticks import run
from tests.unit.fakes import WHOLE, Play, committed

SENT = {f"w{n}": torch.full((2, 3), float(n)) for n in range(12)}


def never() -> None:
    pass


def arrivals(expected: dict[str, str] | None, check: Any = never) -> Arrivals:
    asked = AskedDigests(expected=None if expected is None else msgspec.json.encode(expected))
    return Arrivals(asked, HostReader(), check, UNPACED)


def source(weights: dict[str, torch.Tensor]) -> Weights:
    yield from weights.items()


def read(compared: Arrivals, weights: dict[str, torch.Tensor]) -> None:
    assert [name for name, _ in compared.watch(source(weights))] == [*weights]
    compared.end_reading()


def test_each_reading_of_a_checkpoint_is_compared() -> None:
    """A target and its draft read the same files, one after the other."""
    compared = arrivals(digests(SENT))
    read(compared, SENT)
    read(compared, SENT)
    assert compared.digests is not None
    assert digest_of_all(compared.digests) == digest_of_all(digests(SENT).values())
    with pytest.raises(Altered, match=r"'w3' came with another digest"):
        read(compared, SENT | {"w3": -SENT["w3"]})


def test_batches_of_one_reading_are_compared_together() -> None:
    compared = arrivals(digests(SENT))
    for name, tensor in SENT.items():
        assert [*compared.watch(source({name: tensor}))] == [(name, tensor)]
    compared.end_reading()
    assert compared.digests == [*digests(SENT).values()]


def test_refusal_names_a_few_of_many_tensors() -> None:
    compared = arrivals(digests(SENT))
    with pytest.raises(Altered) as refused:
        read(compared, {name: -tensor for name, tensor in SENT.items()} | {"w0": SENT["w0"]})
    assert "'w1', 'w2'" in str(refused.value)
    assert "and 3 more came with another digest" in str(refused.value)


def load(compared: Arrivals, weights: dict[str, torch.Tensor]) -> None:
    """Fail at the end, as a loader does."""
    with compared.explaining():
        for _ in compared.watch(source(weights)):
            pass
        raise Refused("no room")


def test_failure_behind_an_altered_tensor_is_explained_by_it() -> None:
    said = r"'w1' came with another digest than expected; then no room"
    with pytest.raises(Altered, match=said):
        load(arrivals(digests(SENT)), SENT | {"w1": -SENT["w1"]})
    with pytest.raises(Refused, match=r"^no room"):
        load(arrivals(digests(SENT)), SENT)


def test_reading_of_a_large_tensor_is_given_up_between_two_pieces() -> None:
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Dropped("the update was dropped")

    large = {"w": torch.zeros(3 * CHUNK_BYTES, dtype=torch.uint8)}
    with pytest.raises(Dropped):
        read(arrivals(None, check), large)
    assert calls == 2


def test_source_is_closed_with_its_reader() -> None:
    closed = []

    def closing_source() -> Weights:
        try:
            yield from SENT.items()
        finally:
            closed.append(True)

    watched = arrivals(None).watch(closing_source())
    next(watched)
    watched.close()
    assert closed == [True]


# ---- in the front end -------------------------------------------------------------------


def cannot_stage(call: Any) -> RankAnswer:
    if isinstance(call, OpenCall) and not call.in_place:
        return Failed(message="'w' differs", error=Unproven.__name__)
    return committed(1) if isinstance(call, CommitCall) else WHOLE[call.answer]


@pytest.mark.parametrize("asked", [{}, {"received_digest": True}, {"expected_digests": {}}])
def test_unproven_model_is_not_written_in_place_with_digests(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    play = Play()
    monkeypatch.setattr(play.ranks, "_do", cannot_stage)
    no_store = SimpleNamespace(hicache_storage_backend=None)
    monkeypatch.setattr("sglang_inflight.capabilities.get_memory", lambda: no_store)

    async def update() -> None:
        play.make(play.updates.update(play.piece(**asked)))
        await play.settle()
        await play.finish()
        await play.made[0]

    if asked:
        with pytest.raises(Unproven, match="'w' differs"):
            run(update())
    else:
        run(update())
    assert any(isinstance(call, CommitCall) for call in play.ranks.called) == (not asked)

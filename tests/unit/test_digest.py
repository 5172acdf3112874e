"""Equal weights have equal digests, however they are read."""

from __future__ import annotations

import threading

import pytest
import torch

from sglang_inflight.scheduler.update.checks import digest
from sglang_inflight.scheduler.update.checks.digest import Digest, digest_of
from sglang_inflight.vocabulary.errors import Dropped, Refused

Weights = list[tuple[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK_BYTES", 64)


@pytest.fixture
def weights() -> Weights:
    """Weights of many dtypes and shapes: large, small, empty, zero-dimensional, and a view."""
    large = torch.arange(4000.0)
    tensors = [
        large,
        large.view(40, 100).t(),
        torch.tensor(3.0),
        torch.empty(0, 7),
        torch.arange(100, dtype=torch.int8),
        torch.arange(33).to(torch.bfloat16),
        torch.tensor([True, False, True]),
        torch.arange(50, dtype=torch.int64).to(torch.float8_e4m3fn),
    ]
    return [(f"layer.{i}", tensor) for i, tensor in enumerate(tensors)]


def digest_in_sequence(weights: Weights) -> str:
    whole = Digest()
    for name, tensor in weights:
        pieces = list(whole.read(name, tensor))
        assert sum(piece.numel() for piece in pieces) == tensor.numel()
    return whole.hexdigest()


def never() -> None:
    pass


@pytest.mark.parametrize("readers", [1, 2, 5, 50])
def test_parallel_readers_make_same_digest(weights: Weights, readers: int) -> None:
    assert digest_of(weights, never, readers) == digest_in_sequence(weights)


def test_any_difference_changes_digest(weights: Weights) -> None:
    found = {digest_of(weights, never, 3)}
    for i, (name, tensor) in enumerate(weights):
        others = [("another", tensor), (name, tensor.reshape(1, *tensor.shape))]
        if tensor.numel():
            changed = tensor.clone().contiguous()
            changed.view(-1).view(torch.uint8)[-1] ^= 1
            others.append((name, changed))
        found |= {digest_of([*weights[:i], one, *weights[i + 1 :]], never, 3) for one in others}
    found.add(digest_of(weights[::-1], never, 3))
    assert len(found) == 2 + sum(3 if tensor.numel() else 2 for _, tensor in weights)


def test_digest_of_no_weights_is_that_of_no_data() -> None:
    assert digest_of([], never) == Digest().hexdigest()


def test_error_in_check_stops_all_readers(weights: Weights) -> None:
    """No reader goes on after the caller raised."""
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise Dropped("the update was dropped")

    before = set(threading.enumerate())
    with pytest.raises(Dropped, match="the update was dropped"):
        digest_of(weights, check, 3)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def test_digest_without_threads_reads_all(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_thread(*args: object, name: str) -> None:
        raise Refused(f"no thread {name!r} can be started")

    monkeypatch.setattr(digest, "start_thread", start_thread)
    assert digest_of(weights, never, 4) == digest_in_sequence(weights)

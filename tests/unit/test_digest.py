"""Equal tensors have equal digests, however they are read, and unequal ones have not."""

from __future__ import annotations

import threading

import pytest
import torch

from sglang_inflight import client, tensor_digest
from sglang_inflight.scheduler.update.checks import digest as of_weights
from sglang_inflight.scheduler.update.checks.digest import digest_of
from sglang_inflight.tensor_digest import Digest
from sglang_inflight.vocabulary.errors import Dropped, Refused

Weights = list[tuple[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_digest, "CHUNK_BYTES", 64)


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

    monkeypatch.setattr(of_weights, "start_thread", start_thread)
    assert digest_of(weights, never, 4) == digest_in_sequence(weights)


ONE = torch.tensor([1.0, -2.0, 3.0, 0.0])


@pytest.mark.parametrize(
    "other",
    [
        ONE.flip(0),
        ONE.view(2, 2),
        ONE.view(torch.int32),
        ONE.to(torch.float64),
        ONE * torch.tensor([1.0, 1.0, 1.0, -1.0]),
        ONE[:3],
    ],
    ids=["order", "shape", "dtype", "precision", "minus_zero", "length"],
)
def test_digest_sees_every_difference_of_a_tensor(other: torch.Tensor) -> None:
    assert client.digest(other, "w") != client.digest(ONE, "w")
    assert client.digest(ONE, "w") == client.digest(ONE.clone(), "w") != client.digest(ONE, "v")


def test_digest_sees_payloads_of_nan() -> None:
    quiet, other = (torch.tensor([bits], dtype=torch.int32) for bits in (0x7FC00000, 0x7FC00001))
    nans = [bits.view(torch.float32) for bits in (quiet, other)]
    assert torch.cat(nans).isnan().all()
    assert client.digest(nans[0], "w") != client.digest(nans[1], "w")


def test_digest_does_not_see_the_layout_of_memory() -> None:
    matrix = torch.arange(4000.0).view(40, 100)
    assert client.digest(matrix.t(), "w") == client.digest(matrix.t().contiguous(), "w")
    assert client.digest(matrix[:, ::3], "w") == client.digest(matrix[:, ::3].clone(), "w")
    assert client.digest(torch.nn.Parameter(matrix), "w") == client.digest(matrix, "w")


def test_digest_of_an_empty_tensor_has_its_shape() -> None:
    assert client.digest(torch.empty(0, 7), "w") != client.digest(torch.empty(7, 0), "w")


def test_digest_of_one_tensor_is_that_of_weights_with_it_alone(weights: Weights) -> None:
    for name, tensor in weights:
        assert client.digest(tensor, name) == digest_of([(name, tensor)], never)
        assert client.digests([(name, tensor)]) == {name: client.digest(tensor, name)}


def test_digest_of_all_has_no_order(weights: Weights) -> None:
    forth, back = client.digests(weights), client.digests(weights[::-1])
    assert forth == back == client.digests(dict(weights))
    whole = client.digest_of_all(forth.values())
    assert whole == client.digest_of_all(back.values())
    parts = [list(forth.values())[:3], list(forth.values())[3:]]
    assert whole == client.digest_of_all(map(client.digest_of_all, parts))
    assert whole != client.digest_of_all([*forth.values(), client.digest(ONE, "w")])


def test_digests_refuse_a_name_that_comes_twice() -> None:
    with pytest.raises(ValueError, match="'w' comes twice"):
        client.digests([("w", ONE), ("w", ONE)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")
def test_digest_of_device_memory_does_not_wait_for_another_stream(weights: Weights) -> None:
    there = [(name, tensor.cuda()) for name, tensor in weights]
    staging, forwards = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(staging):
        # memory is allocated once, and an allocation may wait for the device
        client.digests(there)
    torch.cuda.synchronize()
    with torch.cuda.stream(forwards):
        # some seconds
        torch.cuda._sleep(10_000_000_000)
    with torch.cuda.stream(staging):
        found = client.digests(there)
    assert not forwards.query()
    assert found == client.digests(weights)

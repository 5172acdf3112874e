"""Tensors shared by another process on a CPU by file descriptor, torch's default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import current_process

import pytest

from sglang_inflight.scheduler.update.sources import tensors
from sglang_inflight.vocabulary.errors import Refused
from tests.support import forked

SHARE = """
import sys
import torch
import torch.multiprocessing
from multiprocessing import process
from multiprocessing.reduction import ForkingPickler

key, strategy = sys.argv[1:]
process.current_process().authkey = bytes.fromhex(key)
torch.multiprocessing.set_sharing_strategy(strategy)
weight = torch.arange(4.0).share_memory_()
payload = bytes(ForkingPickler.dumps([("weight", weight)]))
print(payload.hex(), flush=True)
sys.stdin.read()
"""


@contextmanager
def sharing(key: bytes, strategy: str) -> Iterator[bytes]:
    """Run a process with ``key`` and yield its payload."""
    with forked.talk(["-c", SHARE, key.hex(), strategy]) as other:
        yield bytes.fromhex(other.says.readline())
        other.hears.close()
        assert other.process.wait() == 0


@pytest.fixture
def own_key() -> bytes:
    return bytes(current_process().authkey)


def test_descriptor_from_a_child_process_is_read(own_key: bytes) -> None:
    with sharing(own_key, "file_descriptor") as payload:
        ((name, weight),) = tensors._unpickle(payload)
    assert (name, weight.tolist()) == ("weight", [0, 1, 2, 3])


def test_descriptor_from_unrelated_process_is_refused() -> None:
    """Python's own message is a rejected digest, without the cause."""
    with (
        sharing(b"another", "file_descriptor") as payload,
        pytest.raises(Refused, match="neither started this server") as refused,
    ):
        tensors._unpickle(payload)
    assert "set_sharing_strategy('file_system')" in str(refused.value)


def test_descriptor_from_ended_process_is_refused(own_key: bytes) -> None:
    with sharing(own_key, "file_descriptor") as payload:
        pass
    with pytest.raises(Refused, match="has ended, or is in another container"):
        tensors._unpickle(payload)


def test_file_system_strategy_is_read() -> None:
    with sharing(b"another", "file_system") as payload:
        ((name, weight),) = tensors._unpickle(payload)
        assert (name, weight.tolist()) == ("weight", [0, 1, 2, 3])

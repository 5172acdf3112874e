"""Handles to shared memory, while torch's manager process answers late.

Torch counts a handle in its memory: the sender adds one for each payload, and each read takes one
away. A handle that is read twice takes the sender's own count, and the memory goes too early.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sglang_inflight.scheduler.update.sources import tensors
from sglang_inflight.scheduler.update.sources.unpickling import TRIES
from sglang_inflight.vocabulary.errors import Refused

LATE = "Shared memory manager connection has timed out\nException raised from recv"
NAMES = ("a", "b", "c")

# shares new tensors for a line "new", and prints a payload of them for another
SEND = """
import sys
import torch
import torch.multiprocessing
from multiprocessing.reduction import ForkingPickler

torch.multiprocessing.set_sharing_strategy("file_system")
# torch ends the process that frees memory after its name is gone: one test's fault is no other's
kept = []
for line in sys.stdin:
    if line == "new\\n":
        kept.append([torch.full((4,), float(n)).share_memory_() for n in range(3)])
    else:
        print(bytes(ForkingPickler.dumps(list(zip("abc", kept[-1])))).hex(), flush=True)
"""


@pytest.fixture(scope="module")
def sender() -> Iterator[subprocess.Popen[str]]:
    """Start another process: torch finds the handles of its own without opening them."""
    with subprocess.Popen(
        [sys.executable, "-c", SEND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        yield process
        process.stdin.close()


@pytest.fixture
def send(sender: subprocess.Popen[str]) -> Callable[[], bytes]:
    """Return the next payload; all payloads of a test have the same tensors."""
    asks, answers = sender.stdin, sender.stdout
    assert asks is not None
    assert answers is not None
    print("new", file=asks, flush=True)

    def send() -> bytes:
        print(file=asks, flush=True)
        return bytes.fromhex(answers.readline())

    return send


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let torch's openings of shared memory fail, each counted from 0."""
    opens = torch.UntypedStorage._new_shared_filename_cpu

    def fail(indexes: set[int], reason: str = LATE) -> None:
        opening = itertools.count()

        def open_late(*arguments: Any) -> Any:
            if next(opening) in indexes:
                raise RuntimeError(reason)
            return opens(*arguments)

        monkeypatch.setattr(torch.UntypedStorage, "_new_shared_filename_cpu", open_late)

    return fail


def read(payload: bytes) -> None:
    """Expect the sender's tensors, and let go of them."""
    found = tensors._unpickle(payload)
    assert [(name, tensor.tolist()) for name, tensor in found] == [
        (name, [float(n)] * 4) for n, name in enumerate(NAMES)
    ]


@pytest.mark.parametrize("late", [{0}, {1}, {2}, {1, 2}, {0, 2, 4}], ids=str)
def test_late_handle_does_not_lose_the_next_payload(
    send: Callable[[], bytes], fail: Callable[..., None], late: set[int]
) -> None:
    fail(late)
    read(send())
    read(send())
    read(send())


@pytest.mark.parametrize(
    ("indexes", "reason"),
    [({*range(1, 1 + TRIES)}, LATE), ({*range(TRIES - 1), TRIES}, LATE), ({1}, "unable to open")],
    ids=["one late handle", "two late handles", "no memory"],
)
def test_unopened_handle_is_refused_and_does_not_lose_the_next_payload(
    send: Callable[[], bytes], fail: Callable[..., None], indexes: set[int], reason: str
) -> None:
    fail(indexes, reason)
    with pytest.raises(Refused, match=f"cannot be unpickled: .*{reason.splitlines()[0]}"):
        read(send())
    read(send())
    read(send())

"""``python -m tests.support.halting_sender URL``: send marker 1 without its head, then halt."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator

import torch

from harness import marker
from sglang_inflight.client import Client, Sender

# short, but long enough to be renewed on busy cores
LEASE_S = 3.0


def _headless() -> Iterator[tuple[str, torch.Tensor]]:
    yield from itertools.islice(marker.tensors(1).items(), len(marker.tensors(1)) - 1)
    time.sleep(600)


if __name__ == "__main__":
    with Client(sys.argv[1]) as client, Sender(client, bucket_bytes=64 << 10) as sender:
        sender.send(_headless(), weight_version="v1", lease_s=LEASE_S)

"""Sample a running server's status periodically."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from sglang_inflight.client import Client, Progress


@dataclass(frozen=True)
class Sample:
    """One sample, with the throughput since the previous one."""

    # seconds since the recording's start
    at: float
    tokens_per_s: float
    state: str
    running: int
    waiting: int
    staged_bytes: int
    weight_version: str
    # commits and rollbacks so far
    epoch: int


@dataclass(frozen=True)
class Change:
    """A change of the served weights between two samples."""

    at: float
    weight_version: str


class Recording:
    """The samples so far. Readable also after an error."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def watch(self, client: Client, every: float, seconds: float | None) -> None:
        """Take a sample every ``every`` seconds, for ``seconds``, or forever if None."""
        began = heard = time.monotonic()
        tokens = _count_tokens(client)
        while seconds is None or heard - began < seconds:
            time.sleep(every)
            status, before, tokens_before = client.status(), heard, tokens
            tokens, heard = _count_tokens(client), time.monotonic()
            replicas = [rank for rank in status.ranks if rank.tp_rank == 0]
            self.samples.append(
                Sample(
                    at=heard - began,
                    # 0 after a restart of the server, whose count starts anew
                    tokens_per_s=max(0.0, tokens - tokens_before) / (heard - before),
                    state=status.state,
                    running=sum(rank.running for rank in replicas),
                    waiting=sum(rank.waiting for rank in replicas),
                    staged_bytes=Progress.read("", status).bytes,
                    weight_version=status.weight_version,
                    epoch=status.epoch,
                )
            )

    @property
    def changes(self) -> list[Change]:
        return [
            Change(after.at, after.weight_version)
            for before, after in itertools.pairwise(self.samples)
            if before.epoch != after.epoch
        ]

    @property
    def pauses(self) -> list[tuple[float, float]]:
        """Begin and end of each pause: the first frozen sample, and the first one after it."""
        pauses: list[tuple[float, float]] = []
        began: float | None = None
        for sample in self.samples:
            if sample.state == "frozen" and began is None:
                began = sample.at
            elif sample.state != "frozen" and began is not None:
                pauses.append((began, sample.at))
                began = None
        if began is not None:
            pauses.append((began, self.samples[-1].at))
        return pauses


def _count_tokens(client: Client) -> float:
    """Return the tokens decoded so far: the last of SGLang's ``decode_moments`` of each replica."""
    moments = (load.get("decode_moments") for load in client.loads()["loads"])
    return sum(of_replica[-1] for of_replica in moments if of_replica is not None)

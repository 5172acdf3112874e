"""What a running server does, looked at again and again."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from sglang_inflight.client import Client, Progress


@dataclass(frozen=True)
class Sample:
    """One look, and the throughput since the look before."""

    # seconds since the first look
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
    """Other weights went live, between two looks."""

    at: float
    weight_version: str


class Recording:
    """The looks so far. It can be read whatever ended the watching."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def watch(self, client: Client, every: float, seconds: float | None) -> None:
        """Look every ``every`` seconds, for ``seconds`` in all or for ever."""
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
                    # fewer than before: the server was started anew
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
        """From a look that saw generation stand still to the first after it that did not."""
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
    """Of all decode steps so far: the last of the sums that SGLang keeps of its steps."""
    moments = (load.get("decode_moments") for load in client.loads()["loads"])
    return sum(of_replica[-1] for of_replica in moments if of_replica is not None)
